"""Expert usage and agreement of expert sets, worked by hand."""

import math

import numpy as np
import pytest

from asyncrl.lens.usage import Agreement, agree, change


def test_change_of_usage():
    before, after = np.asarray([[2, 2, 0, 0], [1, 1, 1, 1]]), np.asarray([[3, 0, 1, 0], [1, 1, 1, 1]])
    first, second = change(before, after, (1, 2))
    # Shares 1/2 1/2 0 0 and 3/4 0 1/4 0.
    assert first["total_variation"] == pytest.approx(0.5)
    assert (first["newly_dead"], first["revived"], first["dead_before"], first["dead_after"]) == ([1], [2], 2, 2)
    assert first["newly_rare"] == [1]
    assert (second["layer"], second["total_variation"], second["newly_dead"]) == (2, 0, [])


def test_an_expert_is_rare_below_a_tenth_of_an_even_share():
    (line,) = change(np.asarray([[500, 500]]), np.asarray([[951, 49]]), (0,))
    assert line["newly_rare"] == [1] and line["newly_dead"] == []
    (line,) = change(np.asarray([[500, 500]]), np.asarray([[949, 51]]), (0,))
    assert line["newly_rare"] == []


def test_agreement_of_sets():
    one = np.asarray([[[0, 1]], [[0, 1]], [[2, 3]]], np.uint8)
    two = np.asarray([[[0, 1]], [[1, 2]], [[0, 1]]], np.uint8)
    found = agree([(one, two)], 1)
    (line,) = found.lines((4,))
    # Equal, one of three in common, nothing in common.
    assert line["layer"] == 4
    assert line["equal_sets"] == pytest.approx(1 / 3) and line["jaccard"] == pytest.approx((1 + 1 / 3) / 3)
    assert (found.tokens, found.equal) == (3, pytest.approx(1 / 3))


def test_agreement_adds_up_over_responses_and_blocks(monkeypatch):
    rng = np.random.default_rng(0)
    one, two = (np.sort(rng.permuted(np.tile(np.arange(4), (40, 2, 1)), axis=2)[..., :2], axis=2) for _ in "ab")
    whole = agree([(one, two)], 2)
    monkeypatch.setattr("asyncrl.lens.usage._BLOCK", 7)
    parts = agree([(one[:2], two[:2]), (one[2:], two[2:])], 2)
    for a, b in zip(parts.lines((0, 1)), whole.lines((0, 1)), strict=True):
        assert a == pytest.approx(b)
    assert 0 < whole.equal < 1


def test_no_token_is_no_number():
    assert math.isnan(Agreement(2).equal)
    assert all(math.isnan(line["jaccard"]) for line in Agreement(2).lines((0, 1)))
