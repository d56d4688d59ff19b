"""The names, shapes and hashes that a real server gives are compared in tests/sglang/test_updates.py."""

import hashlib

import numpy as np
import pytest
import torch

from asyncrl.weights.engine_checksums import SMALL_BYTES, expected, sample
from asyncrl.weights.fp8 import dequantise, quantise
from asyncrl.weights.tile_hash import tile_hash

L = "model.layers.0"


def sha(*tensors):
    data = b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)
    return hashlib.sha256(data).hexdigest()[:16]


def matrix(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def both(*tensors):
    data = torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for t in tensors]).numpy()
    return {sha(*tensors), f"{tile_hash(data):016x}"}


# Of SGLang 0.5.23's own kernels (kernels/ops/memory/gpu_tensor_hash.py: hash_tiles32_kernel_blocked, then
# add_tree_reduce_u64_kernel and _final_splitmix64, as gpu_tensor_hash calls them) under the interpreter of triton 3.9.0
# on a CPU: TRITON_INTERPRET=1, tensors on the CPU.
@pytest.mark.parametrize(
    ("size", "value"),
    [
        (1, "3d93a6540b54ef2a"),
        (3, "2080a47c7e79c366"),
        (4, "b2dd353a7c0ed360"),
        (5, "f536406ada7bb683"),
        (1020, "ac85c6d36e2f195a"),
        (32767, "3e0bed46d2b7ea16"),
        (32768, "dbbe0ffe3ef7bcb0"),
        (32769, "24ccba8207d22c4e"),
        (98321, "871ca5114fbd7673"),
        (262144, "d902ca3e87f6fe8a"),
        (294917, "02e2487b473b4978"),
        (655363, "4ea7a4df2eda9bba"),
    ],
)
def test_the_hash_is_that_of_the_servers_kernel(size, value):
    data = (np.arange(size, dtype=np.uint64) * 2654435761 >> 7).astype(np.uint8)
    assert f"{tile_hash(data):016x}" == value


def test_threads_change_nothing(monkeypatch):
    data = np.random.default_rng(0).integers(0, 256, 3_000_001, dtype=np.uint8)
    alone = tile_hash(data)
    monkeypatch.setattr("asyncrl.weights.tile_hash._FEW", 1)
    monkeypatch.setattr("asyncrl.weights.tile_hash._THREADS", 3)
    assert tile_hash(data) == alone


def test_no_bytes_hash_to_zero():
    assert tile_hash(np.zeros(0, np.uint8)) == 0


def test_a_name_that_was_sent_has_the_hash_of_its_bytes_on_cpu_and_gpu():
    weight = torch.tensor([1.0, -2.0])
    assert expected({"model.norm.weight": weight}, ["model.norm.weight"], 1) == {
        "model.norm.weight": frozenset({hashlib.sha256(bytes.fromhex("0000803f000000c0")).hexdigest()[:16]})
        | both(weight)
    }


def test_fused_names_are_parts_back_to_back():
    q, k, v, gate, up = (matrix(n, 8).to(torch.bfloat16) for n in (8, 4, 2, 6, 5))
    tensors = {
        f"{L}.self_attn.q_proj.weight": q,
        f"{L}.self_attn.k_proj.weight": k,
        f"{L}.self_attn.v_proj.weight": v,
        f"{L}.mlp.gate_proj.weight": gate,
        f"{L}.mlp.up_proj.weight": up,
    }
    names = [f"{L}.self_attn.qkv_proj.weight", f"{L}.mlp.gate_up_proj.weight"]
    assert expected(tensors, names, 1) == {names[0]: both(q, k, v), names[1]: both(gate, up)}


@pytest.mark.parametrize("kinds", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_experts_are_stacked_gate_before_up(kinds):
    experts = [[matrix(3, 4) + e, matrix(3, 4) - e, matrix(4, 3) + e] for e in range(11)]
    tensors = {
        f"{L}.mlp.experts.{e}.{kind}.weight": tensor
        for e, parts in enumerate(experts)
        for kind, tensor in zip(kinds, parts, strict=True)
    }
    names = [f"{L}.mlp.experts.w13_weight", f"{L}.mlp.experts.w2_weight"]
    assert expected(tensors, names, 1) == {
        names[0]: both(*[t for gate, up, _ in experts for t in (gate, up)]),
        names[1]: both(*[down for _, _, down in experts]),
    }


def test_vocabulary_rows_may_be_padded():
    embedding, head = matrix(16, 3), matrix(64, 3)
    padded = torch.cat([embedding, torch.zeros(48, 3)])
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    assert expected(tensors, list(tensors), 1) == {
        "model.embed_tokens.weight": both(embedding) | both(padded),
        "lm_head.weight": both(head),
    }


def test_an_output_matrix_that_was_not_sent_must_be_the_embeddings():
    embedding = matrix(64, 3)
    assert expected({"model.embed_tokens.weight": embedding}, ["lm_head.weight"], 1) == {
        "lm_head.weight": both(embedding)
    }


def test_fp8_is_what_it_stands_for_in_bfloat16():
    parts = {f"{L}.self_attn.{p}_proj.weight": quantise(matrix(128, 256)) for p in "qkv"}
    tensors = {name: pair.data for name, pair in parts.items()} | {
        f"{name}_scale_inv": pair.scale_inv for name, pair in parts.items()
    }
    name = f"{L}.self_attn.qkv_proj.weight"
    assert expected(tensors, [name], 1) == {name: both(*[dequantise(*pair) for pair in parts.values()])}


def test_names_that_do_not_follow_are_left_out():
    tensors = {f"{L}.self_attn.q_proj.weight": matrix(2, 2)}
    names = [f"{L}.self_attn.qkv_proj.weight", f"{L}.mlp.experts.w13_weight", "rotary.cos_sin_cache", "lm_head.weight"]
    assert expected(tensors, names, 1) == {}


def test_of_several_ranks_only_what_each_has_whole():
    tensors = {
        name: matrix(2, 2)
        for name in (
            f"{L}.input_layernorm.weight",
            f"{L}.post_attention_layernorm.weight",
            f"{L}.self_attn.q_norm.weight",
            "model.norm.weight",
            f"{L}.mlp.gate.weight",
            f"{L}.mlp.gate.e_score_correction_bias",
            f"{L}.self_attn.o_proj.weight",
            f"{L}.mlp.down_proj.weight",
            "model.embed_tokens.weight",
            "lm_head.weight",
        )
    }
    assert list(expected(tensors, list(tensors), 2)) == sorted(list(tensors)[:6])


def test_small_tensors_come_each_time_and_large_ones_in_turns():
    big = {f"w{i}": SMALL_BYTES + 1 + i for i in range(10)}
    sizes = big | {"huge": 10**9, "a": 1, "b": SMALL_BYTES}
    turns = [sample(sizes, turn, 3 * 2**20 + 30) for turn in range(100)]
    assert all(names[:2] == ["a", "b"] for names in turns)
    for names in turns:
        large = names[2:]
        assert large == ["huge"] or sum(sizes[n] for n in large) <= 3 * 2**20 + 30
    period = next(i for i in range(1, 100) if turns[i] == turns[0])
    assert sorted(n for names in turns[:period] for n in names[2:]) == sorted([*big, "huge"])
    assert period <= 7


def test_without_large_ones_every_turn_is_the_same():
    assert sample({"a": 1}, 5, 10) == ["a"]
    assert sample({}, 5, 10) == []
