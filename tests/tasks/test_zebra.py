"""Grids of ZebraLogic: all cells for the reward, the share of right ones as a part."""

from __future__ import annotations

import json

import pytest

from asyncrl.errors import TaskError
from asyncrl.tasks import gate, rewards
from asyncrl.tasks.base import Item
from asyncrl.tasks.zebra import gold_response, last_solution, score_grid

GOLD = json.dumps({"header": ["House", "Name", "Drink"], "rows": [["1", "Arnold", "boba tea"], ["2", "Bob", "water"]]})
RIGHT = {"House 1": {"Name": "Arnold", "Drink": "boba tea"}, "House 2": {"Name": "Bob", "Drink": "water"}}


def response(solution: object) -> str:
    return json.dumps({"reasoning": 'Bob {is} "in" house 2', "solution": solution})


def test_a_right_grid_earns_one_and_case_and_spaces_do_not_count() -> None:
    other = {"House 2": {"Drink": "WATER", "Name": " bob "}, "House 1": {"Name": ["Arnold", "x"], "Drink": "Boba tea"}}
    for text in (response(RIGHT), f"So:\n```json\n{response(other)}\n```\nDone.", gold_response(GOLD)):
        verdict = score_grid(text, GOLD)
        assert verdict.reward == 1.0
        assert verdict.parts == {"cell_accuracy": 1.0, "answered": 1.0}
        assert verdict.extracted == "arnold,boba tea;bob,water"


def test_a_wrong_cell_earns_nothing_but_the_others_count_as_a_part() -> None:
    wrong = {**RIGHT, "House 2": {"Name": "Bob", "Drink": "milk"}}
    assert score_grid(response(wrong), GOLD)[:2] == (0.0, {"cell_accuracy": 0.75, "answered": 1.0})
    assert score_grid(response({"House 1": RIGHT["House 1"]}), GOLD).parts["cell_accuracy"] == 0.5


@pytest.mark.parametrize(
    "solution",
    [None, 5, "Arnold", [], {"House 1": None}, {"House 1": {"Name": None, "Drink": {"a": 1}}}, {"House 1": 3}],
)
def test_odd_solutions_are_answers_without_a_right_cell(solution: object) -> None:
    verdict = score_grid(response(solution), GOLD)
    assert verdict.reward == 0.0
    assert verdict.parts["cell_accuracy"] == 0.0


@pytest.mark.parametrize("cell", [True, 1.5, ["Arnold"], [], [[]], {"x": 1}, None, "arnold"])
def test_odd_cells_never_raise(cell: object) -> None:
    verdict = score_grid(response({**RIGHT, "House 1": {"Name": cell, "Drink": "boba tea"}}), GOLD)
    assert verdict.parts["cell_accuracy"] == (1.0 if cell in ("arnold", ["Arnold"]) else 0.75)


def test_numbers_are_compared_as_text() -> None:
    gold = json.dumps({"header": ["House", "Age"], "rows": [["1", "30"]]})
    assert score_grid('{"solution": {"House 1": {"Age": 30}}}', gold).reward == 1.0


def test_the_last_complete_object_with_a_solution_counts() -> None:
    wrong = {**RIGHT, "House 2": {"Name": "Eve", "Drink": "water"}}
    assert score_grid(response(wrong) + response(RIGHT), GOLD).reward == 1.0
    assert score_grid(response(RIGHT) + response(wrong), GOLD).reward == 0.0
    # Cut off, or without a solution: the one before it counts.
    assert score_grid(response(RIGHT) + response(wrong)[:-1], GOLD).reward == 1.0
    assert score_grid(response(RIGHT) + ' I am {"sure": true}, {really}.', GOLD).reward == 1.0
    assert score_grid('An odd " and a { before: ' + response(RIGHT), GOLD).reward == 1.0


@pytest.mark.parametrize("text", ["", "no", "{}", '{"solution"', '{"solution": }', response(RIGHT)[:-1], "{" + "}" * 9])
def test_no_answer(text: str) -> None:
    assert score_grid(text, GOLD) == (0.0, {"cell_accuracy": 0.0, "answered": 0.0}, "")


@pytest.mark.parametrize(
    "unit",
    ["{", "}", "{}", '{"', '{"a":', '{"a":{},', '"', "\\", "[", '{"a":[', '{"solution":', '{"a":1}', "{ ", '{"1":9'],
)
def test_a_megabyte_of_braces_is_read_a_few_times_at_most(unit: str) -> None:
    noise = unit * (1_000_000 // len(unit))
    assert last_solution(noise) is None
    assert score_grid(noise + "\n" + response(RIGHT), GOLD).reward == 1.0


def test_a_number_of_too_many_digits_is_no_answer() -> None:
    assert last_solution('{"solution": ' + "9" * 10_000 + "}") is None


@pytest.mark.parametrize(
    "gold",
    [
        "",
        "[]",
        '{"header": ["House"], "rows": [["1"]]}',
        '{"header": ["Name", "House"], "rows": [["1", "a"]]}',
        '{"header": ["House", "Name"], "rows": []}',
        '{"header": ["House", "Name"], "rows": [["1"]]}',
        '{"header": ["House", "Name"], "rows": [["1", "___"]]}',
        '{"header": ["House", "Name"], "rows": [["1", null]]}',
    ],
)
def test_a_gold_answer_of_another_form_is_an_error_and_no_reward(gold: str) -> None:
    with pytest.raises(TaskError, match="zebra_grid: the gold answer"):
        score_grid(response(RIGHT), gold)


def test_a_large_grid_is_named_by_its_hash() -> None:
    header = ["House", *[f"c{i}" for i in range(6)]]
    rows = [[str(i + 1), *["a long value of a cell"] * 6] for i in range(6)]
    gold = json.dumps({"header": header, "rows": rows})
    said = score_grid(gold_response(gold), gold)
    assert said.reward == 1.0
    assert said.extracted.startswith("grid ")
    assert said.extracted == score_grid(gold_response(gold).replace("a long value", " A Long Value"), gold).extracted


def test_the_grader_passes_the_gate_by_name() -> None:
    gate.check("zebra_grid", [Item("a puzzle", GOLD)])
    assert rewards.score("zebra_grid", response(RIGHT), GOLD) == 1.0
