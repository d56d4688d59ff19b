"""Soft overlong punishment: by hand, with limit 100, buffer 20 and penalty 1 unless said otherwise."""

import pytest

from asyncrl.generator.shaping import shape
from asyncrl.sections.algorithm import AlgorithmSection


def penalised(length: int, finish: str = "stop", penalty: float = 1.0, buffer: int = 20, limit: int = 100) -> float:
    a = AlgorithmSection(truncated="penalise", truncated_penalty=penalty, overlong_buffer=buffer)
    reward, parts = shape(0.5, {"format": 0.1}, length, finish, a, limit)
    assert parts.keys() == {"format", "truncation_penalty"} and parts["format"] == 0.1
    assert reward == 0.5 + parts["truncation_penalty"]
    return parts["truncation_penalty"]


@pytest.mark.parametrize("truncated", ["keep", "mask"])
def test_keep_and_mask_leave_the_reward_alone(truncated):
    a = AlgorithmSection(truncated=truncated)
    assert shape(0.5, {"format": 0.1}, 100, "length", a, 100) == (0.5, {"format": 0.1})


@pytest.mark.parametrize(("length", "penalty"), [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1)])
def test_the_penalty_grows_evenly_over_the_buffer(length, penalty):
    assert penalised(length) == pytest.approx(penalty)
    assert penalised(length, penalty=4.0) == pytest.approx(4 * penalty)


@pytest.mark.parametrize("length", [3, 90, 100, 120])
def test_what_was_cut_off_loses_all_of_it_whatever_its_length(length):
    # An episode of several turns ends by its limit with fewer tokens, too.
    assert penalised(length, "length") == penalised(length, "length", buffer=0) == -1


def test_without_a_buffer_only_what_was_cut_off_is_penalised():
    assert penalised(100, "stop", buffer=0) == 0


def test_no_length_loses_more_than_the_penalty():
    assert penalised(150) == -1


def test_a_full_set_of_parts_has_room_for_the_penalty():
    a = AlgorithmSection(truncated="penalise")
    _, parts = shape(1.0, {f"p{i}": 1.0 for i in range(32)}, 5, "length", a, 5)
    assert len(parts) == 32 and parts["truncation_penalty"] == -1
