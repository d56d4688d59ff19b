import pytest
import torch

from asyncrl.errors import ConfigError, WeightSyncError
from asyncrl.weights.fp8 import quantise
from asyncrl.weights.rollout import for_sglang

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}


def stream(*names):
    return [(name, torch.full((4, 4), float(i + 1))) for i, name in enumerate(names)]


def names(out):
    return [name for name, _ in out]


def test_a_tied_model_gets_its_output_matrix_last():
    weights = stream("model.embed_tokens.weight", "model.norm.weight")
    out = list(for_sglang(weights, {"tie_word_embeddings": True}))
    assert names(out) == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert out[2][1] is weights[0][1]


def test_it_is_added_only_where_it_is_tied_and_missing():
    weights = stream("model.embed_tokens.weight", "lm_head.weight")
    assert list(for_sglang(weights, {"tie_word_embeddings": True})) == weights
    weights = stream("model.embed_tokens.weight", "model.norm.weight")
    for config in ({}, {"tie_word_embeddings": False}, {"tie_word_embeddings": None}):
        assert list(for_sglang(weights, config)) == weights


def test_a_tied_model_without_embeddings_is_an_error():
    with pytest.raises(WeightSyncError, match=r"no model.embed_tokens.weight to send as lm_head.weight"):
        list(for_sglang(stream("model.norm.weight"), {"tie_word_embeddings": True}))


def test_the_stream_is_walked_once_and_lazily():
    seen = []

    def walk():
        for name, tensor in stream("model.embed_tokens.weight", "b"):
            seen.append(name)
            yield name, tensor

    out = for_sglang(walk(), {"tie_word_embeddings": True})
    assert not seen
    assert next(out)[0] == "model.embed_tokens.weight" and seen == ["model.embed_tokens.weight"]


def test_fp8_is_for_linear_layers_and_experts_only():
    layer = "model.layers.0"
    linear = [
        f"{layer}.self_attn.q_proj.weight",
        f"{layer}.self_attn.o_proj.weight",
        f"{layer}.mlp.experts.7.down_proj.weight",
        f"{layer}.mlp.gate_proj.weight",
        f"{layer}.block_sparse_moe.experts.0.w1.weight",
    ]
    other = [
        "model.embed_tokens.weight",
        f"{layer}.input_layernorm.weight",
        f"{layer}.self_attn.q_norm.weight",
        f"{layer}.self_attn.q_proj.bias",
        f"{layer}.mlp.gate.weight",
        f"{layer}.mlp.shared_expert_gate.weight",
        "lm_head.weight",
    ]
    weights = stream(*linear, *other)
    out = dict(for_sglang(weights, {"quantization_config": BLOCKS}, "fp8_block"))
    assert list(out) == [n for name in linear for n in (name, f"{name}_scale_inv")] + other
    for name, tensor in weights:
        if name in other:
            assert out[name] is tensor
        else:
            data, scale = quantise(tensor)
            assert out[name].dtype == torch.float8_e4m3fn and torch.equal(out[name].float(), data.float())
            assert torch.equal(out[f"{name}_scale_inv"], scale)


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_modules_that_the_folder_leaves_alone_stay(key):
    kept = ["lm_head", "model.layers.0", "layers.1.self_attn.q_proj"]
    config = {"quantization_config": BLOCKS | {key: kept}}
    weights = stream(
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.10.self_attn.q_proj.weight",
    )
    quantised = [n for n, t in for_sglang(weights, config, "fp8_block") if t.dtype == torch.float8_e4m3fn]
    assert quantised == ["model.layers.1.self_attn.k_proj.weight", "model.layers.10.self_attn.q_proj.weight"]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"quantization_config": BLOCKS | {"weight_block_size": [64, 64]}},
        {"quantization_config": BLOCKS | {"weight_block_size": None}},
        {"quantization_config": BLOCKS | {"quant_method": "awq"}},
        {"quantization_config": BLOCKS | {"activation_scheme": "static"}},
    ],
)
def test_servers_that_did_not_start_from_such_blocks_are_refused(config):
    with pytest.raises(ConfigError, match=r"weights.quantize=fp8_block needs .* set generator.model to"):
        for_sglang([], config, "fp8_block")


def test_an_error_names_the_tensor():
    weights = [("model.layers.0.self_attn.q_proj.weight", torch.tensor([[float("nan")]]))]
    with pytest.raises(WeightSyncError, match=r"layers.0.self_attn.q_proj.weight: .*non-finite"):
        list(for_sglang(weights, {"quantization_config": BLOCKS}, "fp8_block"))
