"""Checks of the reference policy before any process starts."""

import json
import shutil

import pytest
import torch

from asyncrl.config import validate
from asyncrl.errors import ConfigError
from asyncrl.preflight import preflight
from tests.helpers.tiny_models import qwen3_dense, qwen3_moe, save


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save(qwen3_moe(), folder / "moe")
    save(qwen3_dense(hidden=48, layers=3), folder / "dense")
    save(qwen3_moe(vocab=72), folder / "wider")
    save(qwen3_dense(max_position_embeddings=32), folder / "short")
    for name, swap in (("moe", False), ("dense", False), ("swapped", True)):
        if swap:
            shutil.copytree(folder / "moe", folder / name)
        tokens = {t: i for i, t in enumerate("ba" if swap else "ab")}
        (folder / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}}))
    return folder


def checked(models, reference, **kl):
    given = {"coef": 0.1, "reference": None if reference is None else str(models / reference)} | kl
    return preflight(validate({"model": {"path": str(models / "moe")}, "algorithm": {"kl": given}}))


@pytest.mark.parametrize("reference", [None, "moe", "dense"])
def test_the_start_model_and_another_architecture_with_the_same_tokens_pass(models, reference):
    assert checked(models, reference).is_moe


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("nowhere", r"has no config\.json; .*set algorithm\.kl\.reference=null for model\.path"),
        ("wider", r"has another vocabulary than model\.path='.*moe' \(72 tokens against 64\): .*same tokenizer"),
        ("swapped", r"has another vocabulary .*\(id 0 is 'b' against 'a', .*set algorithm\.kl\.reference=null"),
        ("short", r"can hold 32 tokens, and a prompt with its response takes up to \d+; .*sampling\.max_new_tokens"),
    ],
)
def test_what_cannot_score_the_responses_is_refused_with_key_value_and_remedy(models, reference, said):
    with pytest.raises(ConfigError, match=rf"^algorithm\.kl\.reference='.*{reference}' {said}"):
        checked(models, reference)


def test_weights_that_cannot_be_loaded_are_refused(models, tmp_path):
    shutil.copytree(models / "dense", tmp_path / "cut")
    (file,) = (tmp_path / "cut").glob("*.safetensors")
    file.unlink()
    torch.save({}, tmp_path / "cut" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"^algorithm\.kl\.reference='.*cut': .*pytorch_model\.bin"):
        checked(models, tmp_path / "cut")


@pytest.mark.parametrize(
    ("role", "reads"),
    [
        ({"generates": True}, True),  # asyncrl run, asyncrl config
        ({"data": False}, True),  # asyncrl learn
        ({"generates": True, "data": False}, False),  # asyncrl generate
        ({"weights": False}, False),  # asyncrl replay
    ],
)
def test_only_where_a_learner_starts_must_the_folder_be_there(models, role, reads):
    """Hosts of generators and of replay do not have it."""
    kl = {"coef": 0.1, "reference": str(models / "nowhere")}
    config = validate({"model": {"path": str(models / "moe")}, "algorithm": {"kl": kl}})
    if not reads:
        assert preflight(config, **role).is_moe
        return
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.reference='.*nowhere' has no config\.json"):
        preflight(config, **role)
