"""Sparse deltas: bit for bit, small where little changed, and never applied to another base."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.weights import delta
from asyncrl.weights.flat import DTYPES, Flat, lay_out, pack, runs

ALWAYS = float("inf")
"""No fallback: the codec must be exact at any density, also where it does not pay."""


def bf16(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)


def bits(dtype: torch.dtype, *patterns: int) -> Tensor:
    raw = np.array(patterns, f"u{dtype.itemsize}")
    return torch.from_numpy(raw.view(np.uint8)).view(dtype)


def flat(**tensors: Tensor) -> Flat:
    return pack(tensors.items())


def same_bits(a: Flat, b: Flat) -> bool:
    return a.entries == b.entries and a.data.tobytes() == b.data.tobytes()


def body(encoded: bytes | None) -> bytes:
    """What follows the head: magic, layout, checksum."""
    assert encoded is not None
    return encoded[24:]


def test_the_bytes_of_a_small_delta():
    old = flat(a=bits(torch.bfloat16, 10, 20, 30, 40))
    new = flat(a=bits(torch.bfloat16, 10, 21, 30, 38))
    # One gap byte each (one unchanged before either); codes: +1 -> 1, -2 -> 4; no raw values.
    assert body(delta.encode(old, new, ALWAYS)) == bytes([2, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]) + bytes([1, 1, 1, 4])
    wide = flat(a=bits(torch.bfloat16, 10, 20, 30, 0x8005))
    # A single far step: two raw bytes are shorter than an escape and two raw bytes.
    assert body(delta.encode(old, wide, ALWAYS)) == bytes([1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]) + bytes([3, 0x05, 0x80])


@pytest.mark.parametrize("position", [0, 1, 254, 255, 256, 509, 510, 511, 999])
def test_gaps_around_the_escape(position: int):
    old, new = torch.zeros(1000, dtype=torch.int16), torch.zeros(1000, dtype=torch.int16)
    new[position] = 1
    encoded = delta.encode(flat(a=old), flat(a=new))
    # position // 255 escapes and one gap, then one code.
    assert len(body(encoded)) == 12 + position // 255 + 1 + 1
    assert same_bits(delta.apply(flat(a=old), encoded), flat(a=new))


@pytest.mark.parametrize("step", [1, -1, 127, -127, 128, -128, 255, 30000, -30000])
def test_steps_around_the_escape(step: int):
    base = torch.full((500,), 32000, dtype=torch.int32)
    near, far = base.clone(), base.clone()
    near[7] += step
    far[::50] += 1
    far[7] += step
    for new in (near, far):
        assert same_bits(delta.apply(flat(a=base), delta.encode(flat(a=base), flat(a=new), ALWAYS)), flat(a=new))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_and_the_ends_of_its_range(dtype: torch.dtype):
    top = 1 if dtype is torch.bool else 2 ** (8 * dtype.itemsize) - 1
    old, new = flat(a=bits(dtype, 0, top, 0, 1, 1)), flat(a=bits(dtype, top, 0, 1, 0, 1))
    assert same_bits(delta.apply(old, delta.encode(old, new, ALWAYS)), new)


def test_nan_payloads_and_the_sign_of_zero_survive():
    old = flat(a=bits(torch.bfloat16, 0x7FC0, 0x7FC1, 0x0000, 0x7F80), b=bits(torch.float32, 0x7FC00001, 0))
    new = flat(a=bits(torch.bfloat16, 0x7FC1, 0xFFC1, 0x8000, 0xFF80), b=bits(torch.float32, 0x7FC00001, 0x80000000))
    assert same_bits(delta.apply(old, delta.encode(old, new, ALWAYS)), new)


def test_nothing_changed_costs_a_head_and_counts_only():
    same = flat(a=torch.ones(5000), b=torch.zeros(0, 3), c=bf16(1.0, 2.0))
    encoded = delta.encode(same, same)
    # One block of float32, one of bfloat16; the empty tensor has none.
    assert len(body(encoded)) == 2 * 12
    assert same_bits(delta.apply(same, encoded), same)


def test_the_full_version_is_cheaper_when_all_changed():
    old, new = torch.zeros(4096, dtype=torch.bfloat16), torch.randn(4096).to(torch.bfloat16)
    assert delta.encode(flat(a=old), flat(a=new)) is None
    # Half of the bytes is the limit: 4096 one-byte codes and gaps are all of them, 1000 are not.
    stepped = old.view(torch.int16).clone()
    stepped[:1000] += 1
    assert delta.encode(flat(a=old), flat(a=stepped.view(torch.bfloat16))) is not None
    assert delta.encode(flat(a=old), flat(a=(old.view(torch.int16) + 1).view(torch.bfloat16))) is None
    assert delta.encode(flat(), flat()) is None
    assert delta.encode(flat(a=torch.zeros(0)), flat(a=torch.zeros(0))) is None


def test_a_block_border_inside_a_tensor():
    old = torch.zeros(2 * 2**20 + 5, dtype=torch.uint8)
    new = old.clone()
    new[[0, 2**20 - 1, 2**20, 2**21 - 1, 2**21, 2**21 + 4]] = torch.tensor([1, 2, 3, 4, 5, 200], dtype=torch.uint8)
    encoded = delta.encode(flat(a=old), flat(a=new))
    assert same_bits(delta.apply(flat(a=old), encoded), flat(a=new))


@pytest.mark.parametrize("far", [False, True], ids=["neighbours", "anything"])
def test_forty_times_smaller_at_one_percent(far: bool):
    generator = torch.Generator().manual_seed(3)
    old = torch.randn(1_000_000, generator=generator).to(torch.bfloat16)
    step = torch.randint(1, 2**15, old.shape, generator=generator) if far else torch.ones(old.shape)
    changed = torch.rand(old.shape, generator=generator) < 0.01
    new = torch.where(changed, old.view(torch.int16) + step.to(torch.int16), old.view(torch.int16)).view(torch.bfloat16)
    encoded = delta.encode(flat(a=old), flat(a=new))
    assert encoded is not None
    assert 2_000_000 / len(encoded) >= (60 if far else 90)
    assert same_bits(delta.apply(flat(a=old), encoded), flat(a=new))


@st.composite
def versions(draw: st.DrawFn) -> tuple[Flat, Flat]:
    """Two versions of up to four tensors, any bits, any part of them changed."""
    old, new = {}, {}
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from([d for d in DTYPES.values() if d is not torch.bool]))
        size = draw(st.sampled_from([0, 1, 2, 3, 17, 300, 1500]))
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        before = rng.integers(0, 256, size * dtype.itemsize, np.uint8).view(f"u{dtype.itemsize}")
        kind = draw(st.sampled_from(["near", "any"]))
        step = rng.integers(1, 200, size) if kind == "near" else rng.integers(0, 2**63, size)
        hit = rng.random(size) < draw(st.sampled_from([0.0, 0.003, 0.01, 0.3, 1.0]))
        after = np.where(hit, before + step.astype(before.dtype), before)
        for target, raw in ((old, before), (new, after)):
            target[f"t{number}"] = bits(dtype, *raw.tolist()) if size else torch.empty(0, dtype=dtype)
    return flat(**old), flat(**new)


@settings(max_examples=200, deadline=None)
@given(versions())
def test_any_two_versions_are_bit_exact(pair: tuple[Flat, Flat]):
    old, new = pair
    before = old.data.tobytes()
    encoded = delta.encode(old, new, ALWAYS)
    if new.data.nbytes == 0:
        return
    assert encoded is not None
    made = delta.apply(old, encoded)
    assert same_bits(made, new)
    assert old.data.tobytes() == before and not np.shares_memory(made.data, old.data)
    smaller = delta.encode(old, new, 1.0)
    assert smaller == (encoded if len(encoded) < new.data.nbytes else None)


@settings(max_examples=200, deadline=None)
@given(versions(), st.data())
def test_damaged_deltas_are_refused_or_harmless(pair: tuple[Flat, Flat], data: st.DataObject):
    old, new = pair
    encoded = delta.encode(old, new, ALWAYS)
    if encoded is None:
        return
    position = data.draw(st.integers(0, len(encoded) - 1))
    damaged = bytearray(encoded)
    damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    cut = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    # Two records can mean the same change, so a flipped bit may be harmless: then the result is the right one.
    for broken in (bytes(damaged), cut, encoded + b"\0"):
        try:
            made = delta.apply(old, broken)
        except WeightSyncError:
            continue
        assert same_bits(made, new)


def test_a_wrong_base_is_never_applied_silently():
    one, two = flat(a=bf16(*[1.0] * 400)), flat(a=bf16(*[2.0] * 400))
    # 1.0078125 is the bf16 after 1.0: one element moves, the other 399 stay those of the base.
    encoded = delta.encode(one, flat(a=bf16(*[1.0] * 399, 1.0078125)))
    assert delta.apply(one, encoded).views()["a"][399] == 1.0078125
    with pytest.raises(WeightSyncError, match="wrong base or damaged"):
        delta.apply(two, encoded)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"b": torch.ones(4)}, r"a float32 \(4,\) against b float32 \(4,\)"),
        ({"a": torch.ones(2, 2)}, r"a float32 \(4,\) against a float32 \(2, 2\)"),
        ({"a": torch.ones(4, dtype=torch.int32)}, r"a float32 \(4,\) against a int32"),
        ({"a": torch.ones(4), "b": torch.ones(1)}, "1 tensors against 2"),
    ],
)
def test_other_names_shapes_and_dtypes_are_refused(other: dict[str, Tensor], says: str):
    base = flat(a=torch.ones(4))
    with pytest.raises(WeightSyncError, match=says):
        delta.encode(base, pack(other.items()))
    with pytest.raises(WeightSyncError, match="other names, dtypes or shapes"):
        delta.apply(pack(other.items()), delta.encode(base, base, ALWAYS))


def test_what_is_no_delta_is_refused():
    base = flat(a=torch.ones(4))
    with pytest.raises(WeightSyncError, match="3 bytes are not a delta"):
        delta.apply(base, b"abc")
    with pytest.raises(WeightSyncError, match="not a delta"):
        delta.apply(base, bytes(100))
    # A count of 4 GB of gaps in a delta of 40 bytes.
    claim = delta.encode(base, base, ALWAYS)[:24] + b"\xff\xff\xff\xff" + bytes(8)
    with pytest.raises(WeightSyncError, match="cut or damaged"):
        delta.apply(base, claim)


def test_layout_aligns_and_joins_tensors_of_one_element_size():
    entries = lay_out([("a", "bfloat16", (3,)), ("b", "int16", (2, 2)), ("e", "float32", (0,)), ("c", "float32", ())])
    assert [(e.offset, e.nbytes) for e in entries] == [(0, 6), (64, 8), (128, 0), (128, 4)]
    assert runs(entries) == [(0, 72, 2), (128, 132, 4)]
    for specs, says in (
        ([("a", "float32", (1,))] * 2, "a comes twice"),
        ([("a", "complex64", (1,))], "dtype complex64"),
        ([("a", "float32", (-1,))], "negative axis"),
    ):
        with pytest.raises(WeightSyncError, match=says):
            lay_out(specs)


def test_views_share_the_buffer_and_keep_the_bits():
    tensors = {"a": bf16(1.0, -0.0), "b": torch.tensor(5), "c": torch.zeros(2, 0), "d": torch.tensor([[True], [False]])}
    packed = pack(tensors.items())
    views = packed.views()
    assert list(views) == list(tensors)
    assert all(
        torch.equal(views[k], v) and views[k].dtype == v.dtype and views[k].shape == v.shape for k, v in tensors.items()
    )
    views["b"].fill_(6)
    assert packed.views()["b"] == 6
