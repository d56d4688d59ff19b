"""Overlap of generation with learner steps, worked by hand."""

import math

from asyncrl.learner.overlap import Overlap, merge


def test_merge_joins_overlapping_intervals():
    assert merge([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]


def test_fraction_is_nan_before_a_step_settled():
    overlap = Overlap()
    overlap.step(0, 10)
    assert math.isnan(overlap.fraction(now=11))


def test_half_of_a_step_was_overlapped():
    overlap = Overlap()
    overlap.step(0, 10)
    overlap.busy([(2, 4), (3, 5), (8, 12)])
    # [2, 5] and [8, 10] of [0, 10].
    assert overlap.fraction(now=20) == 0.5


def test_steps_accumulate_and_late_intervals_count():
    overlap = Overlap()
    overlap.step(0, 10)
    overlap.step(10, 20)
    overlap.busy([(0, 10)])
    assert overlap.fraction(now=14) == 1.0
    overlap.busy([(15, 17)])
    assert overlap.fraction(now=30) == 0.6
