"""Selection: counts, ties, permutations, undefined drift, buckets, the long-run rate, the controls."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from asyncrl.algos.select import Selection, select, select_outliers, select_random, unit_signal

NAN = math.nan


def _ids(n: int) -> list[str]:
    return [f"p{i // 4}/{i % 4}" for i in range(n)]


def _spread(n: int) -> list[float]:
    """Distinct drifts in (0, 1), in no order of length or id."""
    return [((7919 * i) % 1009 + 1) / 1011 for i in range(n)]


def _dropped(selection: Selection) -> list[int]:
    return (~selection.keep).nonzero().flatten().tolist()


def _hash_order(ids: list[str], update: int) -> list[int]:
    return sorted(range(len(ids)), key=lambda i: xxhash.xxh3_64_intdigest(f"{ids[i]}|{update}".encode()))


@pytest.mark.parametrize(
    ("n", "dropped", "carry", "buckets"),
    [(0, 0, 0.0, 0), (1, 0, 0.08, 1), (4, 0, 0.32, 1), (10, 0, 0.8, 1), (12, 0, 0.96, 1), (64, 5, 0.12, 4),
     (256, 20, 0.48, 4)],
)  # fmt: skip
def test_first_update_at_q_008(n: int, dropped: int, carry: float, buckets: int) -> None:
    result = select(torch.tensor(_spread(n)), torch.arange(n), _ids(n), 0.08)
    assert result.keep.dtype == torch.bool
    assert result.keep.shape == result.bucket.shape == (n,)
    assert len(_dropped(result)) == dropped
    assert result.carry == pytest.approx(carry, abs=1e-9)
    assert result.unfilled == 0
    assert len(set(result.bucket.tolist())) == buckets


def test_highest_drift_of_each_bucket_goes() -> None:
    # n=8, q=0.25: quota 2, 2 buckets by length {1..4} and {5..8}, one from each.
    lengths = [5, 1, 6, 2, 7, 3, 8, 4]
    drift = [0.9, 0.1, 0.8, 0.3, 0.7, 0.2, 0.95, 0.25]
    result = select(drift, lengths, list("abcdefgh"), 0.25)
    assert result.bucket.tolist() == [1, 0, 1, 0, 1, 0, 1, 0]
    assert _dropped(result) == [3, 6]


def test_length_ties_are_cut_by_id() -> None:
    result = select([0.1] * 4, [3] * 4, ["d", "b", "c", "a"], 0.0, buckets=2)
    assert result.bucket.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(("n", "sizes"), [(10, [3, 2, 3, 2]), (2, [1, 0, 1, 0]), (7, [2, 2, 2, 1])])
def test_bucket_sizes_differ_by_one_at_most(n: int, sizes: list[int]) -> None:
    bucket = select(_spread(n), list(range(n)), _ids(n), 0.0, buckets=4).bucket
    assert torch.bincount(bucket, minlength=4).tolist() == sizes


def test_explicit_edges_are_inclusive_upper_bounds() -> None:
    result = select([0.5] * 6, [1, 8, 9, 16, 17, 99], list("abcdef"), 0.0, bucket_edges=[8, 16])
    assert result.bucket.tolist() == [0, 0, 1, 1, 2, 2]


def test_ties_go_by_hash_of_id_and_update() -> None:
    ids = list("abcdefghijkl")
    victims = set()
    for update in range(40):
        result = select([0.5] * 12, [7] * 12, ids, 0.25, buckets=1, update=update)
        assert set(_dropped(result)) == set(_hash_order(ids, update)[:3])
        victims.update(_dropped(result))
    assert victims == set(range(12))


def test_one_tied_place_goes_by_hash() -> None:
    # xxh3_64("a|0") = 7685044460566420582, xxh3_64("b|0") = 2473305630907422148: b goes first.
    assert [xxhash.xxh3_64_intdigest(f"{i}|0".encode()) for i in "ab"] == [7685044460566420582, 2473305630907422148]
    assert _dropped(select([0.5, 0.5, 0.1], [1, 2, 3], ["a", "b", "c"], 0.34, buckets=1)) == [1]


@pytest.mark.parametrize("drift", [_spread(64), [0.25] * 64, [0.0, 0.5, 0.5, NAN] * 16])
def test_any_permutation_keeps_the_same_set(drift: list[float]) -> None:
    lengths = [(37 * i) % 11 for i in range(64)]
    ids = _ids(64)
    wanted = None
    for seed in range(8):
        order = list(range(64))
        random.Random(seed).shuffle(order)
        result = select([drift[i] for i in order], [lengths[i] for i in order], [ids[i] for i in order], 0.1,
                        carry=0.7, update=5)  # fmt: skip
        got = (
            {ids[i] for i, k in zip(order, result.keep.tolist(), strict=True) if k},
            {(ids[i], b) for i, b in zip(order, result.bucket.tolist(), strict=True)},
            result.carry,
            result.unfilled,
        )
        wanted = wanted or got
        assert got == wanted


@pytest.mark.parametrize("n", [4, 10, 12, 25, 26, 38, 49, 64, 100, 256])
def test_rate_over_100_updates(n: int) -> None:
    carry, total = 0.0, 0
    per_bucket, sizes = np.zeros(4, dtype=np.int64), np.zeros(4, dtype=np.int64)
    for update in range(100):
        drift = torch.tensor(_spread(n))[torch.randperm(n, generator=torch.Generator().manual_seed(update))]
        result = select(drift, [(53 * i) % 97 for i in range(n)], _ids(n), 0.08, carry=carry, update=update)
        bucket = result.bucket.numpy()
        per_bucket += np.bincount(bucket[~result.keep.numpy()], minlength=4)
        sizes = np.bincount(bucket, minlength=4)
        total += len(_dropped(result))
        carry = result.carry
        assert result.unfilled == 0
    assert abs(total - 8 * n) <= 1
    for dropped, size in zip(per_bucket, sizes, strict=True):
        if size:
            assert abs(dropped / (100 * size) - 0.08) <= 1 / (100 * size) + 1e-12


def test_zero_drift_is_never_dropped_and_unfilled_is_counted() -> None:
    result = select([0.0] * 12, list(range(12)), _ids(12), 0.5, carry=0.25)
    assert (_dropped(result), result.carry, result.unfilled) == ([], 0.25, 6)
    result = select([0.0, 0.0, 0.4, 0.0], [1, 2, 3, 4], list("abcd"), 0.75, buckets=1)
    assert (_dropped(result), result.carry, result.unfilled) == ([2], 0.0, 2)


def test_unfilled_quota_stays_in_its_bucket() -> None:
    # 2 buckets of 4, quota 4 = 2 + 2. The short bucket has no drift: its 2 are unfilled, not moved to the long one.
    result = select([0.0] * 4 + [0.1, 0.2, 0.3, 0.4], list(range(8)), list("abcdefgh"), 0.5, buckets=2)
    assert (_dropped(result), result.unfilled) == ([6, 7], 2)


def test_one_response_stays_in_every_bucket() -> None:
    # B22: q=0.9 of 8 is 7; 4 buckets of 2 can give one each.
    result = select(_spread(8), list(range(8)), _ids(8), 0.9)
    assert torch.bincount(result.bucket[result.keep], minlength=4).tolist() == [1, 1, 1, 1]
    assert result.unfilled == 3
    assert result.carry == pytest.approx(0.2)
    alone = select([1.0], [5], ["a"], 0.99, carry=0.5)
    assert (alone.keep.tolist(), alone.unfilled) == ([True], 1)
    assert alone.carry == pytest.approx(0.49)


def test_undefined_drift_is_not_ranked_nor_counted() -> None:
    # B26: 4 of 12 undefined: n = 8, quota 2; keep and drop decide about the undefined only.
    drift = [NAN, 0.2, 0.3, 0.9, 0.1, NAN, 0.8, 0.4, 0.5, 0.6, NAN, NAN]
    kept = select(drift, [9] * 12, _ids(12), 0.25, buckets=1)
    assert _dropped(kept) == [3, 6]
    dropped = select(drift, [9] * 12, _ids(12), 0.25, buckets=1, on_undefined="drop")
    assert _dropped(dropped) == [0, 3, 5, 6, 10, 11]
    assert kept.carry == dropped.carry == 0.0
    nothing = select([NAN] * 3, [0, 0, 0], list("abc"), 0.5, carry=0.25)
    assert (nothing.keep.tolist(), nothing.carry, nothing.unfilled) == ([True] * 3, 0.25, 0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, -1e-9, 1.0000001])
def test_drift_outside_its_range_raises(bad: float) -> None:
    for function in (select, select_random):
        with pytest.raises(ValueError, match="drift of response 'b'"):
            function([0.1, bad], [1, 2], ["a", "b"], 0.5)
    with pytest.raises(ValueError, match="drift of response 'b'"):
        select_outliers([0.1, bad], [1, 2], ["a", "b"])


def test_the_ends_of_the_range_are_legal() -> None:
    assert _dropped(select([1.0, -0.0, 0.0], [1, 2, 3], list("abc"), 0.67, buckets=1)) == [0]


def test_bad_arguments_raise() -> None:
    good = ([0.1, 0.2], [1, 2], ["a", "b"])
    settings: tuple[dict[str, Any], ...] = (
        {"buckets": 0},
        {"buckets": "four"},
        {"buckets": True},
        {"bucket_edges": []},
        {"bucket_edges": [8, 8]},
        {"carry": 1.0},
        {"carry": NAN},
        {"on_undefined": "ignore"},
    )
    for kwargs in settings:
        with pytest.raises(ValueError, match=next(iter(kwargs))):
            select(*good, 0.1, **kwargs)
    with pytest.raises(ValueError, match="q="):
        select(*good, 1.0)
    with pytest.raises(ValueError, match="distinct"):
        select([0.1, 0.2], [1, 2], ["a", "a"], 0.1)
    with pytest.raises(ValueError, match=r"must be \[B\]"):
        select([0.1, 0.2], [1], ["a", "b"], 0.1)


def test_numpy_torch_and_lists_agree() -> None:
    drift = [0.5, 0.25, NAN, 0.125]
    results = [
        select(make(drift), make([4, 3, 2, 1]), list("abcd"), 0.5, buckets=1) for make in (list, np.array, torch.tensor)
    ]
    assert {tuple(r.keep.tolist()) for r in results} == {(False, True, True, True)}


def test_random_drops_as_many_per_bucket_and_ignores_drift() -> None:
    drift, lengths, ids = _spread(64), list(range(64)), _ids(64)
    for update in (0, 1, 2):
        chosen = select(drift, lengths, ids, 0.2, carry=0.5, update=update)
        control = select_random(drift, lengths, ids, 0.2, carry=0.5, update=update)
        for b in range(4):
            here = chosen.bucket == b
            assert int((~chosen.keep & here).sum()) == int((~control.keep & here).sum())
            order = [i for i in _hash_order(ids, update) if here[i]]
            assert [i for i in _dropped(control) if here[i]] == sorted(order[: int((~control.keep & here).sum())])
        assert (chosen.carry, chosen.unfilled) == (control.carry, control.unfilled)
        other = select_random(drift[::-1], lengths, ids, 0.2, carry=0.5, update=update)
        assert torch.equal(other.keep, control.keep)


def test_random_respects_what_select_could_not_fill() -> None:
    control = select_random([0.0] * 7 + [0.5, NAN], [3] * 9, list("abcdefghi"), 0.5, buckets=1)
    assert len(_dropped(control)) == 1
    assert control.unfilled == 3
    assert control.keep[8]


def test_outlier_gate_by_hand() -> None:
    # Median 0.06, |x - median| = .02 .01 .00 .01 .34, MAD 0.01: limit 0.10 (k=4), 0.43 (k=37), 0.065 (k=0.5).
    drift, lengths, ids = [0.04, 0.05, 0.06, 0.07, 0.40], [1, 2, 3, 4, 5], list("abcde")
    result = select_outliers(drift, lengths, ids)
    assert (_dropped(result), result.carry, result.unfilled) == ([4], 0.0, 0)
    assert _dropped(select_outliers(drift, lengths, ids, k=37)) == []
    assert _dropped(select_outliers(drift, lengths, ids, floor=0.4)) == []
    assert _dropped(select_outliers(drift, lengths, ids, k=0.5)) == [3, 4]


def test_outlier_floor_guards_a_fleet_of_zeros() -> None:
    drift = [0.0, 0.0, 0.0, 0.019, 0.021, NAN]
    assert _dropped(select_outliers(drift, [1] * 6, list("abcdef"))) == [4]
    assert _dropped(select_outliers(drift, [1] * 6, list("abcdef"), on_undefined="drop")) == [4, 5]


def test_outlier_gate_drops_a_broken_minority_whole() -> None:
    # A quarter is broken: top-q at 0.08 takes 5 of 16, the gate all 16 and nobody else.
    drift = [0.02 + 0.0005 * (i % 7) if i % 4 else 0.5 for i in range(64)]
    result = select_outliers(drift, [(11 * i) % 31 for i in range(64)], _ids(64))
    assert _dropped(result) == list(range(0, 64, 4))


def test_unit_signal_keeps_the_order() -> None:
    got = unit_signal(torch.tensor([0.0, 1.0, 3.0, NAN]))
    assert got.dtype == torch.float64
    assert got[:3].tolist() == [0.0, 0.5, 0.75]
    assert torch.isnan(got[3])
