"""Data epochs of weighted sources: no prompt twice in one, all equally often over time, the right mix everywhere."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import TaskError
from asyncrl.replay.mixing import Mixing


def mixing(sizes: dict[str, int], weights: dict[str, float], seed: int = 0) -> tuple[Mixing, np.ndarray]:
    sources = [name for name, n in sizes.items() for _ in range(n)]
    return Mixing(len(sources), seed, sources, weights), np.asarray(sources)


def test_without_weights_every_data_epoch_is_the_seeded_order_of_all_prompts():
    plain = Mixing(50, 7)
    for epoch in range(4):
        expected = np.random.default_rng([7, epoch]).permutation(50)
        assert plain.order(epoch).tolist() == expected.tolist()
        # One source is no mix, whatever its weight.
        assert mixing({"a": 50}, {"a": 3.0}, 7)[0].order(epoch).tolist() == expected.tolist()
    assert [plain.start(e) for e in range(3)] == [0, 50, 100]
    assert plain.turns(3, plain.order(3)).tolist() == [3] * 50


def test_equal_weights_are_equal_shares_whatever_the_sizes():
    m, sources = mixing({"a": 6, "b": 18}, {"a": 1.0, "b": 1.0})
    orders = [m.order(e) for e in range(3)]
    assert [len(o) for o in orders] == [12, 12, 12] and m.start(3) == 36
    for order in orders:
        assert Counter(sources[order].tolist()) == {"a": 6, "b": 6}
        # One of each in every two.
        assert all(set(sources[order[i : i + 2]]) == {"a", "b"} for i in range(0, 12, 2))
        assert sorted(i for i in order.tolist() if i < 6) == list(range(6))
    # Three data epochs are once through the larger source, and three times through the smaller one.
    assert sorted(i for o in orders for i in o.tolist() if i >= 6) == list(range(6, 24))
    assert orders[0].tolist() != orders[1].tolist()


def test_weights_in_proportion_to_the_sizes_are_every_prompt_once():
    m, _ = mixing({"a": 30, "b": 10}, {"a": 30, "b": 10})
    assert sorted(m.order(5).tolist()) == list(range(40)) and m.start(2) == 80


def test_a_turn_counts_the_data_epochs_that_had_the_prompt_before():
    m, _ = mixing({"a": 4, "b": 10}, {"a": 2.0, "b": 1.5})
    before: Counter[int] = Counter()
    for epoch in range(40):
        order = m.order(epoch)
        assert m.turns(epoch, order).tolist() == [before[i] for i in order.tolist()]
        before.update(order.tolist())


def test_seeds_give_other_orders_and_the_same_seed_the_same():
    sizes, weights = {"a": 20, "b": 30}, {"a": 1.0, "b": 0.3}
    orders = [mixing(sizes, weights, seed)[0].order(3).tolist() for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize(
    ("weights", "match"),
    [({"a": 1.0, "c": 1.0}, "'b' of task.train has prompts, but no weight"),
     ({"a": 1.0, "b": 1.0, "c": 2.0}, "'c' of task.train has a weight, but no prompt")],
)  # fmt: skip
def test_a_source_without_a_weight_or_a_prompt_is_refused(weights, match):
    with pytest.raises(TaskError, match=match):
        mixing({"a": 3, "b": 3}, weights)


SIZES = st.lists(st.integers(1, 40), min_size=2, max_size=5)
WEIGHTS = st.sampled_from([0.01, 0.1, 0.3, 1.0, 2.5, 3.0, 7.0, 100.0])


@settings(max_examples=60, deadline=None)
@given(st.data(), SIZES, st.integers(0, 5))
def test_every_mix_keeps_its_promises(data, sizes, seed):
    named = {f"s{i}": n for i, n in enumerate(sizes)}
    weights = {name: data.draw(WEIGHTS) for name in named}
    m, sources = mixing(named, weights, seed)
    total = sum(weights.values())
    share = {name: Fraction(repr(w)) / sum(Fraction(repr(x)) for x in weights.values()) for name, w in weights.items()}
    num = len(named)
    drawn: list[int] = []
    for epoch in range(120):
        order = m.order(epoch)
        assert len(order) > 0 and len(set(order.tolist())) == len(order), "twice in a data epoch"
        assert m.start(epoch) == len(drawn)
        drawn += order.tolist()
        if len(drawn) > 3000:
            break
    often = np.bincount(drawn, minlength=len(sources))
    for name in named:
        mine = often[sources == name]
        assert mine.max() - mine.min() <= 1, "some prompt of a source comes more often than another"
        # Over the whole: off by less than one prompt for each source.
        assert abs(mine.sum() - float(share[name]) * len(drawn)) <= num
    of_source = sources[drawn]
    rng = np.random.default_rng(seed)
    for _ in range(30):
        start = int(rng.integers(0, len(drawn)))
        stretch = of_source[start : start + int(rng.integers(1, 200))]
        for name, weight in weights.items():
            # A stretch over many short data epochs gathers the rounding of both of its ends.
            assert abs((stretch == name).sum() - weight / total * len(stretch)) <= 2 * num + 2
