"""Collate: alignment, the staleness mask and micro-batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.errors import RouteError
from asyncrl.learner.batch import collate, micro_batches, padded_tokens, rows_of, spread
from asyncrl.learner.score import plan
from asyncrl.learner.shard import World
from asyncrl.types import Group, ModelInfo, Prompt, Segment, Trajectory, Version
from tests.learner.groups import make_trajectory

INFO = ModelInfo((0, 1), 4, 2, 10)


def group_of(*trajectories: Trajectory, prompt=(1, 2, 3), temperature=1.0) -> Group:
    ids = np.asarray(prompt, np.int32)
    return Group("0/p", Prompt("p", ids, "", "", "t"), "g0", 0, temperature, trajectories)


def traced(tid: str, base: int, num_prompt: int, num_tokens: int) -> Trajectory:
    """Routes row s holds the ids (base + s) % 4 and (base + s + 1) % 4 in both layers."""
    s = num_prompt + num_tokens - 1
    first = (np.arange(s) + base) % 4
    routes = np.repeat(np.stack([first, (first + 1) % 4], -1)[:, None], 2, axis=1).astype(np.uint8)
    return Trajectory(
        tid, np.arange(4, 4 + num_tokens, dtype=np.int32), -np.arange(1, num_tokens + 1, dtype=np.float32),
        np.ones(num_tokens, bool), (Segment(Version(0, 5), 0, num_tokens),), 0.0, "stop",
        np.ones((1, 2, 4), np.uint16), routes,
    )  # fmt: skip


def test_everything_of_a_response_token_stands_at_the_position_that_predicts_it():
    rows = rows_of([group_of(traced("a", 0, 3, 2), temperature=0.6)], 5, 0, INFO)
    batch = collate(rows, [0], INFO, True, True)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5]]
    assert batch.targets.tolist() == [[2, 3, 4, 5, 0]]
    # Input position 2 (the last prompt token) predicts the first response token; 4 predicts nothing.
    assert batch.predict_mask.tolist() == [[False, False, True, True, False]]
    assert batch.rollout_logp.tolist() == [[0, 0, -1, -2, 0]]
    assert batch.temperature.tolist() == [pytest.approx(0.6)]
    # S - 1 = 4 rows are forced, the row of the last token is "no route".
    assert batch.routes[0, 0].tolist() == [[0, 1], [1, 2], [2, 3], [3, 0], [-1, -1]]


def test_padding_gives_no_route_no_loss_and_no_token():
    rows = rows_of([group_of(traced("a", 0, 3, 3), traced("b", 1, 3, 1))], 5, 0, INFO)
    batch = collate(rows, [0, 1], INFO, True, True)
    assert batch.input_ids.shape == (2, 6)
    assert batch.predict_mask[1].tolist() == [False, False, True, False, False, False]
    assert (batch.routes[:, 1, 3:] == -1).all()
    assert batch.routes[1, 1, :3].tolist() == [[1, 2], [2, 3], [3, 0]]


def test_response_cut_by_length_keeps_all_its_mask_entries():
    rows = rows_of([group_of(traced("a", 0, 2, 5), traced("b", 0, 2, 8), prompt=(1, 2))], 5, 0, INFO)
    batch = collate(rows, [0, 1], INFO, True, False)
    assert batch.predict_mask.sum(1).tolist() == [5, 8]


def test_only_the_tokens_older_than_the_bound_lose_their_mask_and_their_counts():
    rng = np.random.default_rng(0)
    t = make_trajectory("a", 3, 10, INFO, rng, ((7, 4), (8, 10)))
    (row,) = rows_of([group_of(t)], 9, 8, INFO)
    assert row.loss_mask.tolist() == [False] * 4 + [True] * 6
    assert row.lag.tolist() == [2] * 4 + [1] * 6
    assert (row.masked, row.max_lag) == (4, 1)
    assert (row.counts == t.route_counts[1]).all()
    # 6 tokens x 2 choices per layer.
    assert row.counts.sum(1).tolist() == [12, 12]


def test_tokens_of_unknown_routes_train_but_are_neither_counted_nor_forced():
    t = replace(traced("a", 0, 3, 4), routes_from=4)
    (row,) = rows_of([group_of(t)], 5, 0, INFO)
    # Rows 2 and 3 predict the first two tokens.
    assert row.count_mask.tolist() == [False, False, True, True] and row.loss_mask.all()
    batch = collate([row], [0], INFO, True, True)
    assert batch.predict_mask.tolist() == [[False, False, True, True, True, True, False]]
    assert batch.count_mask.tolist() == [[False, False, False, False, True, True, False]]
    assert batch.routes[1, 0].tolist() == [[-1, -1]] * 4 + [[0, 1], [1, 2], [-1, -1]]
    assert (t.routes[:4] != 255).all()  # the record itself is as it came
    moved = batch.to(torch.device("cpu"))
    assert torch.equal(moved.count_mask, batch.count_mask) and torch.equal(moved.predict_mask, batch.predict_mask)


@pytest.mark.parametrize(("first", "counted"), [(0, 4), (2, 4), (3, 3), (6, 0)])
def test_unknown_prompt_rows_cost_no_token(first, counted):
    (row,) = rows_of([group_of(replace(traced("a", 0, 3, 4), routes_from=first))], 5, 0, INFO)
    assert row.count_mask.sum() == counted
    batch = collate([row], [0], INFO, True, True)
    assert (batch.routes[0, 0, :, 0] >= 0).tolist() == [first <= s < 6 for s in range(7)]


def test_lag_of_a_response_is_the_largest_lag_of_a_used_token():
    t = make_trajectory("a", 3, 10, INFO, np.random.default_rng(0), ((7, 4), (8, 10)))
    (row,) = rows_of([group_of(t)], 9, 7, INFO)
    assert row.max_lag == 2


def test_empty_response_has_no_tokens_and_zero_counts():
    t = make_trajectory("a", 3, 0, INFO, np.random.default_rng(0))
    (row,) = rows_of([group_of(t)], 9, 0, INFO)
    assert row.counts.sum() == 0
    batch = collate([row], [0], INFO, True, True)
    assert not batch.predict_mask.any()


@pytest.mark.parametrize("cut", [-1, 1])
def test_routes_of_another_row_count_are_refused_by_name(cut):
    t = traced("0/p#0.3", 0, 3, 4)
    routes = np.concatenate([t.routes, t.routes[:1]]) if cut > 0 else t.routes[:-1]
    bad = replace(t, routes=routes)
    with pytest.raises(RouteError, match=r"0/p#0\.3.*\[6, 2, 2\].*\[[57], 2, 2\]"):
        collate(rows_of([group_of(bad)], 5, 0, INFO), [0], INFO, True, True)


def test_counts_of_another_model_are_refused():
    with pytest.raises(RouteError, match="3 MoE layers"):
        rows_of([group_of(traced("a", 0, 3, 2))], 5, 0, ModelInfo((0, 1, 2), 4, 2, 10))


def test_tracer_rows_follow_their_tokens_through_sorting_and_splitting():
    lengths = [5, 1, 3, 2, 4, 1]
    made = [traced(f"t{i}", i, 3, n) for i, n in enumerate(lengths)]
    rows = rows_of([group_of(*made)], 5, 0, INFO)
    seen = set()
    for index in micro_batches([r.size for r in rows], range(6), 16):
        batch = collate(rows, index, INFO, True, True)
        for j, i in enumerate(index):
            seen.add(i)
            n = 3 + lengths[i] - 1
            assert batch.routes[0, j, :n, 0].tolist() == [(i + s) % 4 for s in range(n)]
            assert (batch.routes[0, j, n:] == -1).all()
    assert seen == set(range(6))


def test_micro_batches_respect_the_budget_and_place_every_row_once():
    rng = np.random.default_rng(1)
    sizes = rng.integers(3, 40, 300).tolist()
    split = micro_batches(sizes, range(300), 512)
    assert sorted(i for b in split for i in b) == list(range(300))
    assert all(len(b) * max(sizes[i] for i in b) <= 512 for b in split)
    # Similar lengths together: little padding.
    assert padded_tokens(sizes, split) <= 1.2 * sum(sizes)


def test_row_longer_than_the_budget_gets_its_own_micro_batch():
    assert micro_batches([100, 3], [0, 1], 50) == [[1], [0]]


def test_rows_spread_over_the_micro_batches_that_another_rank_needs():
    # This rank alone would take [1, 2, 3], [4, 5] under 12 padded tokens; with three forwards to run anyway:
    sizes = [1, 2, 3, 4, 5]
    assert micro_batches(sizes, range(5), 12) == [[0, 1, 2], [3, 4]]
    assert spread(sizes, range(5), 12, 2) == [[0, 1, 2], [3, 4]]
    assert spread(sizes, range(5), 12, 3) == [[0, 1], [2, 3], [4]]


def test_spare_micro_batches_are_empty_and_first_so_that_the_long_rows_of_all_ranks_meet():
    assert spread([10, 10], [0, 1], 64, 3) == [[], [0], [1]]
    assert spread([], [], 64, 2) == [[], []]


def test_spread_makes_the_largest_micro_batch_as_small_as_the_number_allows():
    rng = np.random.default_rng(2)
    sizes = np.exp(rng.normal(3, 0.7, 40)).astype(int).clip(1, 100).tolist()
    needed = len(micro_batches(sizes, range(40), 255))
    for count in range(needed, needed + 6):
        split = spread(sizes, range(40), 255, count)
        assert len(split) == count
        assert sorted(i for b in split for i in b) == list(range(40))
        largest = max(padded_tokens(sizes, [b]) for b in split)
        # One token less in the budget needs more micro-batches, or no row could be that small.
        assert len(micro_batches(sizes, range(40), largest - 1)) > count or largest == max(sizes)
    assert largest < 255


def test_rows_longer_than_the_budget_do_not_loosen_it_for_the_others():
    assert spread([100, 3, 3], [0, 1, 2], 6, 2) == [[1, 2], [0]]
    assert spread([100, 3, 3], [0, 1, 2], 6, 3) == [[1], [2], [0]]


def planned(lengths, silent, budget, fuse=True):
    rows = rows_of([group_of(*[traced(f"t{i}", i, 3, n - 3) for i, n in enumerate(lengths)])], 5, 0, INFO)
    batches, fused = plan(rows, silent, INFO, budget, fuse, False, World(0, 1, torch.device("cpu")))
    return [(b.index, b.grad) for b in batches], fused


def test_one_forward_serves_both_passes_when_what_trains_fits_the_budget():
    # 2 x 6 padded tokens with a graph; the silent row is scored before, without one.
    assert planned([5, 6, 9], [False, False, True], 12) == ([((2,), False), ((0, 1), True)], True)


@pytest.mark.parametrize(("budget", "fuse"), [(10, True), (12, False)])
def test_separate_scoring_has_no_graph_and_makes_no_difference_between_rows(budget, fuse):
    batches, fused = planned([5, 6, 4], [False, False, True], budget, fuse)
    assert not fused
    assert not any(grad for _, grad in batches)
    assert sorted(i for index, _ in batches for i in index) == [0, 1, 2]


def test_a_row_above_the_budget_is_told_once(caplog):
    for _ in range(2):
        planned([5, 23], [False, False], 17)
    (record,) = caplog.records
    assert "longer than learner.micro_batch_tokens=17" in record.getMessage()


def test_a_batch_without_anything_to_train_has_one_forward_with_a_graph():
    # So that gradients exist, as zeros, on every rank.
    assert planned([5, 6], [True, True], 100) == ([((0, 1), False), ((), True)], True)


def test_empty_micro_batch_is_one_row_without_loss():
    batch = collate([], [], INFO, True, True)
    assert batch.input_ids.shape == (1, 2)
    assert not batch.predict_mask.any()
    assert (batch.routes == -1).all()
    assert batch.index == ()
    assert torch.isfinite(batch.rollout_logp).all()
