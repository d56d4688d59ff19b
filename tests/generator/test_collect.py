"""Completions to trajectories: histograms per segment, and everything misaligned is refused (B15, B19, B20)."""

import numpy as np
import pytest

from asyncrl.errors import RouteError, TrajectoryError
from asyncrl.generator.busy import BusyLog
from asyncrl.generator.collect import count_routes, to_trajectory
from asyncrl.types import Completion, ModelInfo, Segment, Version

INFO = ModelInfo((0, 1), 4, 2, 10)


def completion(num_prompt=3, num_tokens=4, segments=None, **changes) -> Completion:
    rows = num_prompt + num_tokens - 1
    routes = np.zeros((rows, 2, 2), np.uint8)
    routes[:, :, 0] = (np.arange(rows) % 3)[:, None]
    routes[:, :, 1] = 3
    fields = {
        "token_ids": np.arange(num_tokens, dtype=np.int32),
        "logprobs": -np.ones(num_tokens, np.float32),
        "segments": (Segment(Version(0, 1), 0, num_tokens),) if segments is None else segments,
        "finish_reason": "stop",
        "routes": routes,
    }
    return Completion(**(fields | changes))


def make(c, num_prompt=3, full=False, stops=None):
    return to_trajectory(c, "0/p#0.1", num_prompt, 1.0, INFO, full, stops)


def test_counts_start_at_the_last_prompt_position():
    t = make(completion())
    # Rows 2, 3, 4, 5 predict the four tokens; their first experts are 2, 0, 1, 2.
    assert t.route_counts.tolist() == [[[1, 1, 2, 4], [1, 1, 2, 4]]]
    assert t.routes is None
    assert t.route_counts.dtype == np.uint16


def test_counts_are_kept_per_version_segment():
    segments = (Segment(Version(0, 7), 0, 1), Segment(Version(0, 8), 1, 4))
    t = make(completion(segments=segments), full=True)
    assert t.route_counts[:, 0].tolist() == [[0, 0, 1, 1], [1, 1, 1, 3]]
    assert t.routes.shape == (6, 2, 2)
    assert (t.oldest, t.newest) == (Version(0, 7), Version(0, 8))


@pytest.mark.parametrize("rows", [5, 7])
def test_wrong_number_of_route_rows_is_refused_naming_both_counts(rows):
    with pytest.raises(RouteError, match=rf"0/p#0\.1.*\[6, 2, 2\].*\[{rows}, 2, 2\]"):
        make(completion(routes=np.zeros((rows, 2, 2), np.uint8)))


def test_prompt_only_request_with_no_new_token_is_accepted():
    t = make(completion(num_tokens=0, segments=()))
    assert t.num_tokens == 0
    assert t.route_counts.shape == (0, 2, 4)
    assert t.oldest is None


def test_expert_id_outside_the_model_is_refused():
    routes = np.zeros((6, 2, 2), np.uint8)
    routes[5, 1, 1] = 4
    with pytest.raises(RouteError, match="expert id 4"):
        make(completion(routes=routes))


def test_width_of_ids_comes_from_the_model_and_not_from_the_values():
    big = ModelInfo((0,), 512, 2, 10)
    routes = np.array([0, 255, 256, 511, 0, 1] * 2, np.uint16).reshape(6, 1, 2)
    t = to_trajectory(completion(routes=routes), "a", 3, 0.0, big, True)
    assert t.routes.dtype == np.uint16
    # Rows 2..5 hold (0, 1), (0, 255), (256, 511), (0, 1).
    assert {int(e): int(t.route_counts[0, 0, e]) for e in np.flatnonzero(t.route_counts[0, 0])} == {
        0: 3, 1: 2, 255: 1, 256: 1, 511: 1,
    }  # fmt: skip
    with pytest.raises(RouteError, match="uint8"):
        to_trajectory(completion(routes=routes.astype(np.uint8)), "a", 3, 0.0, big, True)


@pytest.mark.parametrize("count", [3, 5])
def test_b19a_another_number_of_log_probs_is_refused_not_cut(count):
    with pytest.raises(TrajectoryError, match=f"4 token ids but {count} log-probs"):
        make(completion(logprobs=-np.ones(count, np.float32)))


@pytest.mark.parametrize("bad", [-np.inf, np.inf, 0.3, 2e-6])
def test_b15_impossible_log_prob_is_refused(bad):
    with pytest.raises(TrajectoryError, match=r"0/p#0\.1: log-prob .* of a sampled token"):
        make(completion(logprobs=np.array([-1, bad, -1, -1], np.float32)))


def test_rounding_above_zero_passes_as_it_is():
    assert make(completion(logprobs=[0.0, 1e-6, -1.0, -2.0])).logprobs[1] == np.float32(1e-6)


@pytest.mark.parametrize("given", [[-0.1, None, float("nan"), -2.0], np.array([-0.1, np.nan, np.nan, -2], np.float32)])
def test_b15_missing_log_probs_pass_as_nan(given):
    t = make(completion(logprobs=given))
    assert t.logprobs.dtype == np.float32
    np.testing.assert_array_equal(t.logprobs, np.array([-0.1, np.nan, np.nan, -2], np.float32))


def test_b15_an_engine_without_any_log_probs_gives_nan_for_each_token():
    t = make(completion(logprobs=None))
    assert np.isnan(t.logprobs).tolist() == [True] * 4 and t.loss_mask.all()


def test_b19b_a_response_that_stopped_holds_its_stop_token_with_its_log_prob():
    # Two stop tokens, 3 and 7: both kinds of end have as many log-probs as ids, and all of them train.
    for end in (3, 7):
        t = make(completion(token_ids=np.array([0, 1, 2, end], np.int32), logprobs=[-1, -1, -1, -0.25]), stops=(3, 7))
        assert (t.token_ids[-1], t.logprobs[-1], t.loss_mask.tolist()) == (end, -0.25, [True] * 4)
    with pytest.raises(TrajectoryError, match=r"ended with 'stop', but its last id 3 is no stop token \[5, 7\]"):
        make(completion(), stops=(5, 7))
    # A cut response, an empty one and one whose request had no stop tokens have none.
    make(completion(finish_reason="length"), stops=(5, 7))
    make(completion(num_tokens=0, segments=()), stops=(5, 7))


@pytest.mark.parametrize("made_up", [0.0, None, -np.inf, 5.0])
def test_b19c_a_token_that_was_not_sampled_is_never_trained_nor_believed(made_up):
    t = make(completion(logprobs=[-1, -1, -1, made_up], sampled=np.array([True, True, True, False])))
    assert t.loss_mask.tolist() == [True, True, True, False]
    assert np.isnan(t.logprobs).tolist() == [False, False, False, True]
    # Rows 2, 3, 4 predict the three sampled tokens; row 5 is not counted.
    assert t.route_counts.tolist() == [[[1, 1, 1, 3], [1, 1, 1, 3]]]
    with pytest.raises(TrajectoryError, match=r"4 token ids but 'sampled' has shape \[3\]"):
        make(completion(sampled=np.ones(3, bool)))


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (None, "no token ids; the engine must return the ids that it sampled, not text"),
        (np.array([0.0, 1.0, 2.0, 3.0]), r"token ids are float64\[4\]"),
        (np.array([[0, 1], [2, 3]]), r"token ids are int64\[2, 2\]"),
        (np.array([0, 1, 2, 10]), r"token ids span \[0, 10\], the vocabulary has 10"),
        (np.array([0, -1, 2, 3]), r"token ids span \[-1, 3\]"),
    ],
)
def test_b20_a_response_without_the_ids_that_were_sampled_is_refused(ids, words):
    with pytest.raises(TrajectoryError, match=words):
        make(completion(token_ids=ids))


def test_masked_tokens_are_not_counted():
    routes = completion().routes
    counts = count_routes(routes, np.array([True, False, False, True]), 2, 4)
    assert counts[0].tolist() == [0, 0, 2, 2]


def test_rows_before_routes_from_are_in_no_count():
    # Rows 2, 3, 4, 5 predict the four tokens; their first experts are 2, 0, 1, 2.
    segments = (Segment(Version(0, 7), 0, 1), Segment(Version(0, 8), 1, 4))
    for first, wanted in (
        (0, [[0, 0, 1, 1], [1, 1, 1, 3]]),
        (2, [[0, 0, 1, 1], [1, 1, 1, 3]]),
        (3, [[0, 0, 0, 0], [1, 1, 1, 3]]),
        (4, [[0, 0, 0, 0], [0, 1, 1, 2]]),
        (6, [[0, 0, 0, 0], [0, 0, 0, 0]]),
    ):
        t = make(completion(segments=segments, routes_from=first), full=True)
        assert t.route_counts[:, 0].tolist() == t.route_counts[:, 1].tolist() == wanted
        assert t.routes_from == first and t.loss_mask.all() and t.routes.shape == (6, 2, 2)
    sampled = np.array([True, True, False, True])
    t = make(completion(segments=segments, routes_from=3, sampled=sampled))
    assert t.route_counts[:, 0].tolist() == [[0, 0, 0, 0], [1, 0, 1, 2]]


@pytest.mark.parametrize("first", [-1, 7])
def test_routes_from_beyond_the_rows_is_refused(first):
    with pytest.raises(RouteError, match=rf"0/p#0\.1: routes_from={first} is outside \[0, 6\], the number of rows"):
        make(completion(routes_from=first))


def test_a_dense_model_has_no_routes_to_cut():
    t = to_trajectory(completion(routes=None, routes_from=5), "a", 3, 0.0, ModelInfo((), 0, 0, 10), True)
    assert (t.routes_from, t.route_counts, t.routes) == (0, None, None)


def test_busy_log_places_increases_at_the_end_of_a_tick():
    busy = BusyLog()
    busy.sample(10.0, 0.0)
    busy.sample(11.0, 0.25)
    busy.sample(11.2, 0.45)
    busy.sample(12.0, 0.45)
    busy.sample(13.0, 0.95)
    assert [tuple(round(x, 6) for x in i) for i in busy.drain()] == [(10.75, 11.2), (12.5, 13.0)]
    assert busy.drain() == []
