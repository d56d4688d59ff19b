"""How tensors are put into broadcasts."""

import itertools

import pytest
import torch

from asyncrl.errors import WeightSyncError
from asyncrl.weights.collective.buckets import fill, nbytes, plan, room_for, spec_of
from asyncrl.weights.flat import DTYPES

F32, BF16, FP8 = "float32", "bfloat16", "float8_e4m3fn"


def test_whole_tensors_in_order_up_to_the_limit():
    a, b, c, d = (("a", F32, (4,)), ("b", F32, (2, 2)), ("c", F32, (1,)), ("d", F32, (8,)))
    assert plan([a, b, c, d], 32) == ((a, b), (c,), (d,))
    assert plan([a, b, c, d], 36) == ((a, b, c), (d,))
    assert plan([a, b, c, d], 10**6) == ((a, b, c, d),)


def test_a_larger_tensor_goes_alone():
    small, large, last = ("s", F32, (1,)), ("l", F32, (1000,)), ("z", F32, (1,))
    assert plan([small, large, last], 64) == ((small,), (large,), (last,))
    assert plan([large, small], 1) == ((large,), (small,))


@pytest.mark.parametrize("limit", [1, 7, 16, 33, 100, 10**6])
def test_every_offset_is_a_multiple_of_the_element_size(limit):
    words = [F32, BF16, FP8, "float64", "int32", "bool", "int8"]
    specs = [
        (f"{i}", word, (size,))
        for i, (word, size) in enumerate(itertools.islice(itertools.cycle(itertools.product(words, (1, 3, 5))), 60))
    ]
    buckets = plan(specs, limit)
    assert sorted(spec for bucket in buckets for spec in bucket) == sorted(specs)
    for bucket in buckets:
        offset = 0
        for spec in bucket:
            assert offset % DTYPES[spec[1]].itemsize == 0
            offset += nbytes(spec)
        assert offset <= limit or len(bucket) == 1


def test_tensors_without_elements_ride_along_and_never_make_a_bucket():
    empty, full = ("e", F32, (0, 4)), ("f", F32, (4,))
    assert plan([empty, full], 16) == ((empty, full),)
    assert plan([full, empty], 16) == ((full, empty),)
    assert plan([empty, full], 4) == ((empty, full),)
    with pytest.raises(WeightSyncError, match="without a single byte"):
        plan([empty], 16)
    with pytest.raises(WeightSyncError, match="without a single byte"):
        plan([], 16)


def test_the_bytes_lie_back_to_back_in_the_order_of_the_bucket():
    weights = {"a": torch.tensor([1.0, 2.0]).bfloat16(), "b": torch.tensor([[3.0]]), "c": torch.arange(6).view(2, 3).T}
    (bucket,) = plan((spec_of(*item) for item in weights.items()), 1000)
    assert [name for name, *_ in bucket] == ["c", "b", "a"]
    room = torch.zeros(room_for([bucket]), dtype=torch.uint8)
    data = fill(bucket, weights, room)
    assert data.numel() == 48 + 4 + 4
    assert data[:48].view(torch.int64).tolist() == [0, 3, 1, 4, 2, 5]
    assert data[48:52].view(torch.float32).tolist() == [3.0]
    assert data[52:].view(torch.bfloat16).tolist() == [1.0, 2.0]


def test_a_tensor_that_goes_alone_is_not_copied():
    weights = {"a": torch.ones(8)}
    buckets = plan([spec_of("a", weights["a"])], 8)
    assert room_for(buckets) == 0
    data = fill(buckets[0], weights, torch.empty(0, dtype=torch.uint8))
    assert data.data_ptr() == weights["a"].data_ptr() and data.dtype == torch.uint8 and data.numel() == 32
