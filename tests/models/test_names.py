"""Checkpoint names: stream() writes what save_pretrained writes, Loader puts it back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, Interleave, WeightConverter

from asyncrl.errors import WeightSyncError
from asyncrl.models.load import load_model
from asyncrl.models.names import Loader, layout, stream
from tests.helpers.tiny_models import FAMILIES, qwen3_dense, qwen3_moe, save

BUILDERS: dict[str, Callable[..., PreTrainedModel]] = {
    **FAMILIES,
    "dense": qwen3_dense,
    "tied": lambda **rest: qwen3_dense(tie_word_embeddings=True, **rest),
    "bfloat16": lambda **rest: qwen3_moe(dtype=torch.bfloat16, **rest),
}


def state(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", BUILDERS)
def test_round_trip_is_bitwise_and_names_are_those_of_save_pretrained(kind: str, tmp_path: Path) -> None:
    source, target = BUILDERS[kind](seed=1), BUILDERS[kind](seed=2)
    weights = dict(stream(source))
    assert all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in weights.values())
    saved = load_file(save(source, tmp_path) / "model.safetensors")
    assert same(weights, saved)
    assert not same(state(source), state(target))
    loader = Loader(target)
    loader.load(weights)
    assert same(state(source), state(target))
    assert loader.shapes == {name: tuple(tensor.shape) for name, tensor in saved.items()}
    ids = torch.arange(6)[None]
    assert torch.equal(source(ids).logits, target(ids).logits)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_a_model_from_disk_streams_the_same_names(kind: str, tmp_path: Path) -> None:
    source = BUILDERS[kind](seed=1)
    weights = dict(stream(source))
    loaded = load_model(save(source, tmp_path), "float32", attention="eager")
    assert same(dict(stream(loaded)), weights)
    other = BUILDERS[kind](seed=2)
    Loader(loaded).load(stream(other))
    assert same(state(loaded), state(other))


def test_experts_are_single_tensors_on_disk() -> None:
    model = qwen3_moe(hidden=32, layers=1, experts=8)
    weights = dict(stream(model))
    live = model.model.layers[0].mlp.experts
    name = "model.layers.0.mlp.experts.3.{}_proj.weight"
    assert torch.equal(weights[name.format("gate")], live.gate_up_proj[3, :32])
    assert torch.equal(weights[name.format("up")], live.gate_up_proj[3, 32:])
    assert torch.equal(weights[name.format("down")], live.down_proj[3])


def test_streamed_tensors_do_not_follow_the_model() -> None:
    model = qwen3_moe()
    before = dict(stream(model))
    kept = {name: tensor.clone() for name, tensor in before.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert same(before, kept)
    assert not same(dict(stream(model)), kept)


def test_loading_casts_to_the_dtype_of_the_model() -> None:
    source, target = qwen3_moe(seed=1), qwen3_moe(seed=2, dtype=torch.bfloat16)
    Loader(target).load(stream(source))
    assert same(state(target), {name: tensor.bfloat16() for name, tensor in state(source).items()})


@pytest.mark.parametrize("fault", ["missing", "extra", "wrong shape", "all"])
def test_what_does_not_fit_is_named_and_changes_nothing(fault: str) -> None:
    model = qwen3_moe(seed=1)
    loader, before = Loader(model), state(model)
    weights = dict(stream(qwen3_moe(seed=2)))
    words = []
    if fault in ("missing", "all"):
        del weights["model.norm.weight"]
        words.append("missing: model.norm.weight")
    if fault in ("extra", "all"):
        weights["model.layers.9.mlp.gate.weight"] = torch.zeros(1)
        words.append("extra: model.layers.9.mlp.gate.weight")
    if fault in ("wrong shape", "all"):
        name = "model.layers.1.mlp.experts.7.up_proj.weight"
        weights[name] = torch.zeros(3, 32)
        words.append(f"wrong shape: {name} (3, 32) for (32, 32)")
    with pytest.raises(WeightSyncError) as caught:
        loader.load(weights)
    assert [word for word in words if word not in str(caught.value)] == []
    assert str(caught.value).count(":") == len(words)
    assert same(state(model), before)


def test_many_missing_names_are_counted() -> None:
    loader = Loader(qwen3_moe())
    with pytest.raises(WeightSyncError, match="and 64 more"):
        loader.load({})


def test_loader_follows_a_model_whose_memory_moved() -> None:
    source, target = qwen3_moe(seed=1), qwen3_moe(seed=2)
    loader = Loader(target)
    target.double()
    loader.load(stream(source))
    assert same(state(target), {name: tensor.double() for name, tensor in state(source).items()})


class Doubled(ConversionOps):
    """A conversion that computes instead of moving values."""

    def convert(self, input_dict: dict[str, Any], source_patterns: Any, target_patterns: Any, **_: Any) -> Any:
        (given,) = input_dict.values()
        return {target_patterns[0]: (given[0] if isinstance(given, list) else given) * 2}

    @property
    def reverse_op(self) -> ConversionOps:
        return self


def converted_by(operation: ConversionOps, seed: int) -> PreTrainedModel:
    """A dense model whose checkpoint holds down_proj under another name, made by the given operation."""
    model = qwen3_dense(seed=seed)
    model._weight_conversions = [WeightConverter(r"mlp\.w2\.weight", r"mlp.down_proj.weight", operations=[operation])]
    return model


def test_pieces_that_are_no_views_are_found_by_index() -> None:
    """Interleaved rows are no strided slice of the live tensor."""
    source, target = converted_by(Interleave(dim=0), 1), converted_by(Interleave(dim=0), 2)
    assert any(piece.index is not None for pieces in layout(source).values() for piece in pieces)
    weights = dict(stream(source))
    live = source.model.layers[0].mlp.down_proj.weight
    assert torch.equal(weights["model.layers.0.mlp.w2.weight"][:4], live[[0, 16, 1, 17]])
    Loader(target).load(weights)
    assert same(state(source), state(target))


def test_conversion_that_changes_values_is_refused() -> None:
    with pytest.raises(WeightSyncError, match=r"layers.0.mlp.down_proj.weight: .* family not supported"):
        Loader(converted_by(Doubled(), 1))
