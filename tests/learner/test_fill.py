"""The sharded start on real FSDP2 ranks: every value, buffer and logit is that of load_model, bit by bit.

Two ranks also save checkpoints, which `asyncrl export` turns into folders.
"""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

from asyncrl.config import save_config, validate
from asyncrl.errors import ConfigError
from asyncrl.learner.export import export_step
from asyncrl.models.fill import fill_sharded, materialize
from asyncrl.models.load import load_model, skeleton
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_models import FAMILIES, qwen3_dense, qwen3_moe
from tests.learner.fill_worker import RANKS, faults

WORKER = Path(__file__).with_name("fill_worker.py")
SMALL = {"hidden_size": 16, "vocab_size": 35}

# Name: builder, dtype of the learner, experts, size of a file. Odd sizes make shards uneven.
CASES = {
    "qwen3_moe": (lambda: qwen3_moe(hidden=16, experts=3, vocab=35), "float32", "grouped_mm", 9_000),
    "mixtral": (lambda: FAMILIES["mixtral"](hidden=16, experts=3, vocab=35), "float32", "grouped_mm", None),
    "deepseek_v3": (lambda: FAMILIES["deepseek_v3"](hidden=16, vocab=35), "float32", "grouped_mm", None),
    "qwen2_moe": (lambda: FAMILIES["qwen2_moe"](**SMALL), "float32", "grouped_mm", None),
    "gpt_oss": (lambda: FAMILIES["gpt_oss"](**SMALL), "float32", "eager", None),
    "bfloat16 on disk": (lambda: qwen3_moe(hidden=16, dtype=torch.bfloat16), "float32", "grouped_mm", 9_000),
    "float16 on disk": (lambda: qwen3_dense(hidden=16, dtype=torch.float16), "float32", "grouped_mm", None),
    "float64": (lambda: FAMILIES["deepseek_v3"](hidden=16), "float64", "eager", None),
    "tied": (lambda: qwen3_dense(hidden=16, vocab=35, tie_word_embeddings=True), "float32", "grouped_mm", None),
}  # fmt: skip

SAVED = ("bfloat16 on disk", "deepseek_v3", "tied")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Arguments of faults() by name, the models written; run folders beside those of SAVED."""
    folder = tmp_path_factory.mktemp("fill")
    cases = {}
    for name, (build, dtype, experts, size) in CASES.items():
        build().save_pretrained(folder / name, **({} if size is None else {"max_shard_size": size}))
        cases[name] = {"folder": str(folder / name), "dtype": dtype, "experts": experts}
        (folder / f"run {name}").mkdir()
        settings = {"model": {"path": str(folder / name)}, "algorithm": {"rdc": {"mode": "off"}}}
        save_config(validate(settings), folder / f"run {name}" / "config.yaml")
    assert len(list((folder / "qwen3_moe").glob("*.safetensors"))) > 2
    return cases


@pytest.fixture(scope="module")
def two_ranks(folders, tmp_path_factory):
    """What two ranks found wrong, by name; checkpoints lie in the run folders then."""
    folder = tmp_path_factory.mktemp("ranks")
    cases = {n: c | {"run": str(run_of(c)) if n in SAVED else None} for n, c in folders.items()}
    (folder / "cases.json").write_text(json.dumps(cases))
    ended = run_ranks(WORKER, RANKS, folder, folder / "cases.json", folder / "out.json")
    assert ended.codes == [0] * RANKS, ended.said[-4000:]
    return json.loads((folder / "out.json").read_text())


def run_of(case):
    start = Path(case["folder"])
    return start.with_name(f"run {start.name}")


@pytest.mark.parametrize("name", CASES)
def test_one_rank_holds_what_load_model_loads(name, folders, world):
    assert faults(**folders[name], mesh=init_device_mesh("cpu", (1,))) == []


@pytest.mark.timeout(600)
def test_two_ranks_hold_what_load_model_loads(two_ranks):
    assert two_ranks == {name: [] for name in CASES}


@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_of_two_ranks_becomes_a_folder(name, folders, two_ranks, tmp_path):
    start = folders[name]["folder"]
    assert len(list((run_of(folders[name]) / "checkpoints" / "u1").glob("*.safetensors"))) == 2
    export_step(run_of(folders[name]), "1", tmp_path / "out", dtype="float32")
    exported, expected = load_model(tmp_path / "out", "float32"), load_model(start, "float32")
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.mul_(1.25)
    ours, theirs = exported.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    assert [n for n in ours if not torch.equal(ours[n], theirs[n])] == []


def test_a_folder_with_other_names_is_loaded_whole_with_a_warning(tmp_path, world, caplog):
    """The base model alone: transformers adds the prefix, but writes it too."""
    build = partial(qwen3_dense, hidden=16, vocab=35, tie_word_embeddings=True)
    build().model.save_pretrained(tmp_path)
    assert faults(str(tmp_path), "float32", "grouped_mm", init_device_mesh("cpu", (1,))) == []
    assert "every rank loads the whole model" in caplog.text


def test_what_does_not_fit_is_named(tmp_path, world):
    def refused(words, **changes):
        file = tmp_path / "model.safetensors"
        tensors = load_file(file)
        save_file({n: t for n, t in (tensors | changes).items() if t is not None}, file, {"format": "pt"})
        for load in (skeleton, load_model):
            with pytest.raises(ConfigError, match=words):
                load(tmp_path, "float32")
        save_file(tensors, file, {"format": "pt"})

    qwen3_moe(hidden=16).save_pretrained(tmp_path)
    refused(r"lacks weights: model\.norm\.weight$", **{"model.norm.weight": None})
    refused(
        r"of another shape than config.json says: lm_head\.weight \(3, 5\) for \(64, 16\)$",
        **{"lm_head.weight": torch.zeros(3, 5)},
    )
    expert = "model.layers.0.mlp.experts.7.up_proj.weight"
    refused("cannot be loaded|gate_up_proj", **{expert: None})
    refused("cannot be loaded|gate_up_proj", **{expert: torch.zeros(3, 5)})


def test_weights_that_nothing_uses_are_named_and_left(tmp_path, world, caplog):
    qwen3_moe(hidden=16).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"value_head.weight": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert faults(str(tmp_path), "float32", "grouped_mm", init_device_mesh("cpu", (1,))) == []
    assert "holds weights that the model does not use: value_head.weight" in caplog.text


def test_a_model_that_is_not_sharded_is_filled_too_and_stays_tied(tmp_path):
    qwen3_dense(hidden=16, tie_word_embeddings=True).save_pretrained(tmp_path)
    model, reference = skeleton(tmp_path, "float32"), load_model(tmp_path, "float32")
    assert all(p.is_meta for p in model.parameters())
    materialize(model, "cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    fill_sharded(model, tmp_path)
    ids = torch.arange(7)[None]
    assert torch.equal(model(ids).logits, reference(ids).logits)
