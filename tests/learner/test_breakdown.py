"""Means by part of the reward and by data source."""

import pytest

from asyncrl.learner.breakdown import MAX_NAMES, scalars
from asyncrl.metrics.names import is_known

ANSWERS = [
    ("math", 1.0, 10, {"format": 0.5, "truncation_penalty": 0.0}),
    ("math", 0.0, 30, {"format": 0.0, "truncation_penalty": -0.5}),
    ("code", 0.5, 8, {"truncation_penalty": 0.0}),
    ("", 0.0, 2, {}),
]


def test_parts_are_means_over_the_responses_that_have_them_and_sources_over_their_own():
    out = scalars(ANSWERS)
    assert out == {
        "reward/format": 0.25,
        "reward/truncation_penalty": pytest.approx(-0.5 / 3),
        "policy/truncated_penalised": 0.25,
        "source/code/reward": 0.5,
        "source/code/length": 8.0,
        "source/code/share": 0.25,
        "source/math/reward": 0.5,
        "source/math/length": 20.0,
        "source/math/share": 0.5,
    }
    assert all(is_known(name) for name in out)


def test_no_responses_and_no_names_are_no_metrics():
    assert scalars([]) == scalars([("", 1.0, 3, {})]) == {}


def test_neither_order_nor_split_changes_a_value():
    answers = [("a", 0.1 * i, i, {"x": 1e16 * (-1) ** i + i}) for i in range(50)]
    assert scalars(answers) == scalars(answers[::-1]) == scalars(answers[20:] + answers[:20])


def test_names_are_bounded_and_written_as_metrics_are():
    out = scalars([(f"s{i:03}", 1.0, 1, {}) for i in range(100)])
    assert len(out) == 3 * MAX_NAMES and "source/s000/share" in out
    out = scalars([("my/source name", 1.0, 1, {"a/b c": 1.0, "no number": float("nan")})])
    assert set(out) == {f"source/my_source_name/{k}" for k in ("reward", "length", "share")} | {"reward/a_b_c"}
