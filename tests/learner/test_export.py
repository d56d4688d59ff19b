"""HF out: a checkpoint becomes a folder that transformers loads and that scores what the learner's policy scores."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from asyncrl.config import save_config, validate
from asyncrl.errors import ConfigError, WeightSyncError
from asyncrl.learner.batch import collate, rows_of
from asyncrl.learner.checkpoint import Checkpoints
from asyncrl.learner.export import export_step
from asyncrl.learner.publish import export, host_copy, published_dtype
from asyncrl.learner.shard import build_policy, reshard
from asyncrl.learner.start import model_fingerprint
from asyncrl.learner.step import Updater
from asyncrl.learner.stored import Progress
from asyncrl.models.describe import describe
from asyncrl.models.folder import weights_of
from asyncrl.process import role_environment
from tests.helpers.tiny_models import FAMILIES, qwen3_dense, qwen3_moe
from tests.learner.groups import make_groups

START = {
    "tied": lambda: qwen3_dense(hidden=16, tie_word_embeddings=True, dtype=torch.bfloat16),
    "fused": lambda: FAMILIES["gpt_oss"](hidden_size=16),
    "split": lambda: qwen3_moe(hidden=16),
}
EXTRA = {"tokenizer.json": "{}", "chat_template.jinja": "{{ messages }}", "generation_config.json": '{"top_k": 7}'}


class Run:
    """A run folder with checkpoints of updates 4 and 8, its policy as it is at 8, and the start model."""

    def __init__(self, folder, kind, world, **model):
        self.start, self.dir = folder / "start", folder / "run"
        START[kind]().save_pretrained(self.start)
        for name, text in EXTRA.items():
            (self.start / name).write_text(text)
        attention = "eager" if kind == "fused" else "sdpa"
        settings = {"model": {"path": str(self.start), "attention": attention} | model}
        self.config = validate(settings | {"algorithm": {"rdc": {"mode": "off"}}})
        self.info = describe(self.start)
        self.dir.mkdir()
        save_config(self.config, self.dir / "config.yaml")
        self.policy = build_policy(self.config.model, self.config.learner, False, world)
        updater = Updater(self.policy, self.config.learner, self.config.algorithm, world)
        checkpoints = Checkpoints(self.dir, model_fingerprint(self.config, self.info), 2, world)
        generator = torch.Generator().manual_seed(0)
        for update in (4, 8):
            with torch.no_grad():
                for p in self.policy.parameters():
                    p.to_local().add_(0.02 * torch.randn(p.shape, generator=generator))
            assert checkpoints.save(self.policy, updater, Progress(0, update, update, 0.0))

    def logps(self):
        """Input ids, targets, mask and the policy's log-probs [B, S] on synthetic groups."""
        rows = rows_of(make_groups(self.info, 2, 2, seed=1, version=0), 0, -9, self.info)
        batch = collate(rows, range(len(rows)), self.info, False, False)
        with torch.no_grad():
            logp = self.policy(batch)[0]
        reshard(self.policy)
        return batch, logp


@pytest.fixture(scope="module", params=list(START))
def made(request, tmp_path_factory, world):
    return Run(tmp_path_factory.mktemp("export"), request.param, world)


@pytest.fixture(scope="module")
def split(tmp_path_factory, world):
    return Run(tmp_path_factory.mktemp("split"), "split", world)


def test_transformers_scores_what_the_policy_scores(made, tmp_path):
    size = export_step(made.dir, "8", tmp_path / "out", dtype="float32")
    assert size == sum(t.nbytes for t in load_file(tmp_path / "out" / "model.safetensors").values())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation=made.config.model.attention)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    batch, logp = made.logps()
    with torch.no_grad():
        logits = model(batch.input_ids).logits / batch.temperature[:, None, None]
    expected = logits.log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]
    mask = batch.predict_mask
    assert mask.sum() > 10
    torch.testing.assert_close(logp[mask], expected[mask], rtol=0, atol=1e-5)


def test_the_folder_is_that_of_save_pretrained(made, world, tmp_path):
    """By default with the dtypes of the start model, and with everything else that lies there."""
    export_step(made.dir, "last", tmp_path / "out")
    assert {f.name for f in (tmp_path / "out").iterdir()} == {f.name for f in made.start.iterdir()}
    for name in (*EXTRA, "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (made.start / name).read_bytes()
    assert weights_of(tmp_path / "out") == weights_of(made.start)
    ours, theirs = load_file(tmp_path / "out" / "model.safetensors"), host_copy(made.policy, world)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n].to(ours[n].dtype)) for n in ours)


def test_another_dtype_is_noted_in_the_config(split, tmp_path):
    export_step(split.dir, "4", tmp_path / "out", dtype="bfloat16")
    assert {s.dtype for s in weights_of(tmp_path / "out").values()} == {"bfloat16"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_steps_differ_and_last_is_the_newest(split, tmp_path):
    for step in ("4", "8", "last"):
        export_step(split.dir, step, tmp_path / step)
    a, b, c = (load_file(tmp_path / step / "model.safetensors") for step in ("4", "8", "last"))
    assert all(torch.equal(b[n], c[n]) for n in b)
    assert not torch.equal(a["lm_head.weight"], b["lm_head.weight"])


def test_the_final_folder_holds_the_weights_as_the_learner_has_them(world, tmp_path):
    run = Run(tmp_path, "tied", world)
    with pytest.raises(ConfigError, match=r"has no step 'final'; it has 4, 8, last$"):
        export_step(run.dir, "final", tmp_path / "out")
    export(run.policy, run.config.model.path, run.dir / "model", world)
    assert {s.dtype for s in weights_of(run.dir / "model").values()} == {"float32"}
    assert json.loads((run.dir / "model" / "config.json").read_text())["dtype"] == "float32"
    live = host_copy(run.policy, world)
    for dtype, words in ((None, "bfloat16"), ("float32", "float32")):
        export_step(run.dir, "final", tmp_path / words, dtype)
        out = load_file(tmp_path / words / "model.safetensors")
        assert all(torch.equal(out[n], live[n].to(getattr(torch, words))) for n in live)
        assert json.loads((tmp_path / words / "config.json").read_text())["dtype"] == words


def test_what_is_there_is_listed(split, tmp_path):
    with pytest.raises(ConfigError, match=r"has no step '5'; it has 4, 8, last$"):
        export_step(split.dir, "5", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"is no run folder: it has no config.yaml"):
        export_step(split.start, "5", tmp_path / "out")
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(split.dir / "config.yaml", empty)
    with pytest.raises(ConfigError, match=r"no checkpoint .*is not over yet"):
        export_step(empty, "last", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fault", ["flipped", "gone", "state"])
def test_a_damaged_checkpoint_is_named_and_nothing_is_written(fault, split, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(split.dir, run)
    file = next((run / "checkpoints" / "u8").glob("*.safetensors"))
    if fault == "flipped":
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
    elif fault == "gone":
        file.unlink()
    else:
        file = file.with_name("state.json")
        file.write_bytes(b"{")
    with pytest.raises(ConfigError, match=r"u8.* is damaged.*take another step") as caught:
        export_step(run, "8", tmp_path / "out")
    assert file.name in str(caught.value)
    assert [f.name for f in tmp_path.iterdir()] == ["run"]
    export_step(run, "4", tmp_path / "out")


def test_only_a_model_folder_is_replaced_and_only_by_force(split, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    export_step(split.dir, "4", out)
    with pytest.raises(ConfigError, match=r"exists and is not empty; give another folder, or --force"):
        export_step(split.dir, "8", out)
    before = load_file(out / "model.safetensors")
    export_step(split.dir, "8", out, force=True)
    assert not torch.equal(before["lm_head.weight"], load_file(out / "model.safetensors")["lm_head.weight"])
    (tmp_path / "diary").mkdir()
    (tmp_path / "diary" / "monday.txt").write_text("rain")
    with pytest.raises(ConfigError, match=r"is no model folder, so --force does not replace it"):
        export_step(split.dir, "8", tmp_path / "diary", force=True)
    for taken in (split.start, split.dir, split.dir.parent, split.dir / "checkpoints" / "u8"):
        with pytest.raises(ConfigError, match=r"is in use by this run or holds it"):
            export_step(split.dir, "8", taken, force=True)
    assert (tmp_path / "diary" / "monday.txt").read_text() == "rain"


def test_another_start_model_is_refused_and_a_moved_one_is_found(split, tmp_path):
    qwen3_moe(hidden=16, experts=4).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"u8 is of another model than .*other.* as --model"):
        export_step(split.dir, "8", tmp_path / "out", model=str(tmp_path / "other"))
    with pytest.raises(ConfigError, match=r"nowhere.*has no config.json.*as --model"):
        export_step(split.dir, "8", tmp_path / "out", model=str(tmp_path / "nowhere"))
    shutil.copytree(split.start, tmp_path / "moved")
    export_step(split.dir, "8", tmp_path / "out", model=str(tmp_path / "moved"))
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_weights_that_are_not_finite_are_not_exported(world, tmp_path):
    run = Run(tmp_path, "split", world)
    export(run.policy, run.config.model.path, tmp_path / "out", world)
    with torch.no_grad():
        run.policy.model.lm_head.weight.to_local()[3, 3] = torch.inf
    with pytest.raises(WeightSyncError, match=r"not exported to .*lm_head.weight is not finite"):
        export(run.policy, run.config.model.path, tmp_path / "out", world)
    assert torch.isfinite(load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"]).all()
    assert not list(tmp_path.glob("*.part"))
    with pytest.raises(WeightSyncError, match=r"not exported to"):
        export(run.policy, run.config.model.path, tmp_path / "start" / "config.json" / "out", world)


@pytest.mark.parametrize(("router_dtype", "wide"), [("checkpoint", False), ("float32", True)])
def test_bfloat16_learners_publish_what_they_compute_with(router_dtype, wide, world, tmp_path):
    run = Run(tmp_path, "split", world, dtype="bfloat16", router_dtype=router_dtype)
    held = host_copy(run.policy, world)
    sent = host_copy(run.policy, world, published_dtype(run.policy, run.config.model))
    assert sent.keys() == held.keys()
    routers = {name for name in sent if name.endswith("mlp.gate.weight")}
    assert len(routers) == 2
    for name, tensor in sent.items():
        expected = held[name] if wide and name in routers else held[name].bfloat16()
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), name


def test_float32_learners_publish_float32(split):
    assert published_dtype(split.policy, split.config.model)("model.norm.weight") is None


@pytest.mark.timeout(400)
def test_the_command_exports(split, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", "export", split.dir, "8", tmp_path / "out", "--dtype", "float16"],
        env={**role_environment(1), "ASYNCRL_ENV": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{tmp_path / 'out'}: ") and done.stdout.endswith(" GB of weights\n")
    assert {s.dtype for s in weights_of(tmp_path / "out").values()} == {"float16"}


def test_a_weight_that_the_checkpoint_lacks_is_named(split, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(split.dir, run)
    (file,) = (run / "checkpoints" / "u8").glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.model.lm_head.weight"]
    save_file(tensors, file)
    state = json.loads((file.parent / "state.json").read_bytes())
    state["files"][file.name] = xxhash.xxh3_64_hexdigest(file.read_bytes())
    (file.parent / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=r"u8 lacks \['lm_head.weight'\]"):
        export_step(run, "8", tmp_path / "out")
