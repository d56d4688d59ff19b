"""How many are dropped: the quota, and its split over buckets through time."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algos.quota import apportion, update_quota


def _run(q: float, sizes: list[int], updates: int, start: int = 0, carry: float = 0.0) -> list[list[int]]:
    """Total per bucket after each update."""
    totals, history = [0] * len(sizes), []
    for update in range(start, start + updates):
        quota, next_carry = update_quota(q, sum(sizes), carry)
        shares = apportion(q, sizes, quota, carry, update)
        assert sum(shares) == quota
        assert min(shares, default=0) >= 0
        totals = [t + s for t, s in zip(totals, shares, strict=True)]
        history.append(totals)
        carry = next_carry
    return history


@pytest.mark.parametrize(
    ("n", "quota", "carry"),
    [
        (0, 0, 0.0),
        (1, 0, 0.08),
        (4, 0, 0.32),
        (10, 0, 0.8),
        (12, 0, 0.96),
        (25, 2, 0.0),
        (64, 5, 0.12),
        (256, 20, 0.48),
    ],
)
def test_quota_by_hand(n: int, quota: int, carry: float) -> None:
    got, left = update_quota(0.08, n, 0.0)
    assert got == quota
    assert left == pytest.approx(carry, abs=1e-9)


def test_only_the_fraction_is_carried() -> None:
    quota, carry = update_quota(0.08, 12, 0.96)
    assert quota == 1
    assert carry == pytest.approx(0.92)
    # Every 25 updates of 0.04 give exactly one, although 25 additions of the float 0.04 miss 1 by rounding.
    carry, total = 0.0, 0
    for _ in range(250):
        quota, carry = update_quota(0.01, 4, carry)
        total += quota
        assert 0 <= carry < 1
    assert total == 10


def test_no_response_leaves_the_carry_alone() -> None:
    assert update_quota(0.08, 0, 0.7) == (0, 0.7)


@pytest.mark.parametrize(("q", "carry"), [(-0.1, 0.0), (1.0, 0.0), (float("nan"), 0.0), (0.1, 1.0), (0.1, -0.1)])
def test_out_of_range_is_refused(q: float, carry: float) -> None:
    with pytest.raises(ValueError, match="must be in"):
        update_quota(q, 4, carry)


def test_first_update_is_largest_remainder() -> None:
    # q n_b = 1.8, 0.7, 0.5; quota 3: whole parts 1, 0, 0; the two left go to the remainders 0.8 and 0.7.
    assert apportion(0.1, [18, 7, 5], 3, 0.0, 0) == [2, 1, 0]
    # 1.4, 0.9, 0.7
    assert apportion(0.1, [14, 9, 7], 3, 0.0, 0) == [1, 1, 1]
    # 1.6, 0.8, 0.6: one left for two remainders of 0.6, the first bucket has the turn at update 0.
    assert apportion(0.1, [16, 8, 6], 3, 0.0, 0) == [2, 1, 0]
    # 0.9 beats 0.6 and 0.7
    assert apportion(0.1, [6, 9, 7], 1, 0.0, 0) == [0, 1, 0]


def test_ties_rotate_with_the_update() -> None:
    # 4 buckets of 16, q n = 5.12: one each, and the fifth goes around.
    shares = [apportion(0.08, [16] * 4, 5, 0.12 * u, u) for u in range(4)]
    assert shares == [[2, 1, 1, 1], [1, 2, 1, 1], [1, 1, 2, 1], [1, 1, 1, 2]]
    # The pattern starts again every 25 updates, each time with another bucket first.
    starts = [apportion(0.08, [16] * 4, 5, 0.0, 25 * i).index(2) for i in range(5)]
    assert starts == [0, 1, 2, 3, 0]


def test_empty_buckets_get_nothing() -> None:
    assert apportion(0.5, [0, 4, 0], 2, 0.0, 3) == [0, 2, 0]
    assert apportion(0.5, [0, 0], 0, 0.0, 3) == [0, 0]
    assert apportion(0.5, [], 0, 0.0, 3) == []


@pytest.mark.parametrize("n", [*range(4, 120, 7), 25, 26, 49, 50, 51, 64, 250, 256])
@pytest.mark.parametrize("start", [0, 1, 37])
def test_100_updates_of_equal_buckets(n: int, start: int) -> None:
    count = min(4, max(1, int(0.08 * n)))
    sizes = [n // count + (b < n % count) for b in range(count)]
    totals = _run(0.08, sizes, 100, start)[-1]
    assert abs(sum(totals) - 8 * n) <= 1
    for total, size in zip(totals, sizes, strict=True):
        assert abs(total - 8 * size) <= 1 + 1e-9


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=9),
    rate=st.fractions(min_value=0, max_value=Fraction(19, 20), max_denominator=60),
    carry=st.sampled_from([0.0, 0.25, 0.7]),
)
def test_every_bucket_is_within_one_at_every_update(sizes: list[int], rate: Fraction, carry: float) -> None:
    for update, totals in enumerate(_run(float(rate), sizes, 80, 0, carry), start=1):
        for total, size in zip(totals, sizes, strict=True):
            assert abs(total - rate * size * update) < 1


@pytest.mark.parametrize("q", [0.083333333, 0.0790123, 3.14159265 / 40])
def test_odd_q_keeps_the_quota_exact(q: float) -> None:
    sizes = [11, 30, 7, 52]
    totals = _run(q, sizes, 150, 900)[-1]
    assert abs(sum(totals) - 150 * q * 100) <= 1
    for total, size in zip(totals, sizes, strict=True):
        assert abs(total - 150 * q * size) < 2


def test_changing_sizes_keep_the_long_run_rate() -> None:
    # No hard bound here, but no bucket may be favoured: 600 updates, sizes wander.
    carry, got, seen = 0.0, [0] * 4, [0] * 4
    for update in range(600):
        sizes = [60 + (7 * update + 3 * b) % 5 for b in range(4)]
        quota, next_carry = update_quota(0.08, sum(sizes), carry)
        for b, share in enumerate(apportion(0.08, sizes, quota, carry, update)):
            got[b] += share
            seen[b] += sizes[b]
        carry = next_carry
    for b in range(4):
        assert got[b] / seen[b] == pytest.approx(0.08, abs=0.001)
