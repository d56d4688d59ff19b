"""load_model: local folders only, every fault named."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.errors import ConfigError
from asyncrl.models.load import load_model
from tests.helpers.tiny_models import qwen3_dense, qwen3_moe, save


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_loaded_model_computes_what_was_saved(experts: str, tmp_path: Path) -> None:
    built = qwen3_moe(implementation=experts)
    loaded = load_model(save(built, tmp_path), "float32", experts=experts)
    ids = torch.arange(5)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, built(ids).logits)
    assert loaded.config._experts_implementation == experts
    assert loaded.config._attn_implementation == "sdpa"
    assert not loaded.training and loaded.config.use_cache is False


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_dtype_of_every_parameter(dtype: str, tmp_path: Path) -> None:
    loaded = load_model(save(qwen3_moe(), tmp_path), dtype)
    assert {p.dtype for p in loaded.parameters()} == {getattr(torch, dtype)}


def test_dense_and_tied_models_load(tmp_path: Path) -> None:
    loaded = load_model(save(qwen3_dense(tie_word_embeddings=True), tmp_path), "float32")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_unknown_dtype_and_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'fp32'"):
        load_model(tmp_path, "fp32")
    with pytest.raises(ConfigError, match=tmp_path.name):
        load_model(tmp_path, "float32")


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    qwen3_moe().config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=tmp_path.name):
        load_model(tmp_path, "float32")


def test_missing_weight_is_not_filled_at_random(tmp_path: Path) -> None:
    file = save(qwen3_moe(), tmp_path) / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight"):
        load_model(tmp_path, "float32")
