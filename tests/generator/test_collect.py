"""Completions to trajectories: histograms per segment, and everything misaligned is refused."""

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


def make(c, num_prompt=3, full=False):
    return to_trajectory(c, "0/p#0.1", num_prompt, 1.0, INFO, full)


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


def test_one_log_prob_too_many_is_refused_not_cut():
    with pytest.raises(TrajectoryError, match="4 token ids but 5 log-probs"):
        make(completion(logprobs=-np.ones(5, np.float32)))


@pytest.mark.parametrize("bad", [-np.inf, 0.3])
def test_impossible_log_prob_is_refused(bad):
    with pytest.raises(TrajectoryError, match="log-prob"):
        make(completion(logprobs=np.array([-1, bad, -1, -1], np.float32)))


def test_missing_log_prob_passes_as_nan():
    t = make(completion(logprobs=np.array([-1, np.nan, -1, -1], np.float32)))
    assert np.isnan(t.logprobs).tolist() == [False, True, False, False]


def test_masked_tokens_are_not_counted():
    routes = completion().routes
    counts = count_routes(routes, np.array([True, False, False, True]), 2, 4)
    assert counts[0].tolist() == [0, 0, 2, 2]


def test_busy_log_places_increases_at_the_end_of_a_tick():
    busy = BusyLog()
    busy.sample(10.0, 0.0)
    busy.sample(11.0, 0.25)
    busy.sample(11.2, 0.45)
    busy.sample(12.0, 0.45)
    busy.sample(13.0, 0.95)
    assert [tuple(round(x, 6) for x in i) for i in busy.drain()] == [(10.75, 11.2), (12.5, 13.0)]
    assert busy.drain() == []
