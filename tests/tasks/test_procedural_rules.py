"""What each rule of the procedural tasks pays for. Field case B65: never for a part, never an exception."""

from __future__ import annotations

import pytest

from asyncrl.tasks import rewards

GRID = "2 1 4 3\n3 4 2 1"
ROLES = "Zoe is a knight, and Amy is a knave."
FUTOSHIKI = "1   3 < 4\n         \n4 > 1   3"
BOARD = "[[0,1],[1,0]]"


@pytest.mark.parametrize(
    ("rule", "text", "answer", "reward"),
    [
        ("number", "so 3 + 4 = 7", "7", 1),
        ("number", "first 7, then 8", "7", 0),
        ("number", "Answer: 7\nbecause 3 + 5 is 8", "7", 1),
        ("number", "\\boxed{7} after 8 steps", "7", 1),
        ("number", "<answer>7</answer> after 8 steps", "7", 1),
        ("number", "\\boxed{8} or rather <answer>7</answer>", "7", 1),
        ("number", "<answer>7</answer> or rather Answer: \\boxed{8}", "7", 0),
        ("number", "**Answer:** -1,250.0", "-1250", 1),
        ("number", "\u22125", "-5", 1),
        ("number", "10-5", "-5", 0),
        ("number", "0.50", "0.5", 1),
        ("number", "0.51", "0.5", 0),
        ("number", "-0", "0", 1),
        ("number", "9" * 10_000, "9", 0),
        ("number", "Answer:", "7", 0),
        ("fraction", "It is\n4/7", "4/7", 1),
        ("fraction", "\\boxed{\\frac{4}{7}}", "4/7", 1),
        ("fraction", "4/7", "$\\dfrac{4}{7}$", 1),
        ("fraction", "8/14", "4/7", 0),
        ("fraction", "-4/7", "4/-7", 1),
        ("fraction", "$ 4 / 7 $.", "4/7", 1),
        ("fraction", "4/7 or 1/2", "4/7", 0),
        ("fraction", "3", "3/1", 1),
        ("word", "Hm.\nYes.", "Yes", 1),
        ("word", "yes", "Yes", 1),
        ("word", "Yes or No", "Yes", 0),
        ("word", "Yes\nNo", "Yes", 0),
        ("word", "Answer: \\text{yes}", "Yes", 1),
        ("word", "<answer>\nyes\n</answer>\nand no more", "Yes", 1),
        ("text", "the word is\n'uneeS'", "uneeS", 1),
        ("text", "unees", "uneeS", 0),
        ("text", "#A  B#", "#A B#", 1),
        ("list", "b, a", "b, a", 1),
        ("list", "a, b", "b, a", 0),
        ("list", "['5', \"-2.50\"]", "['5', '-2.5']", 1),
        ("list", "b, a, a", "b, a", 0),
        ("factors", "3 x 2 x 3", "2 \u00d7 3 \u00d7 3", 1),
        ("factors", "2 * 3", "2 \u00d7 3 \u00d7 3", 0),
        ("factors", "18", "2 \u00d7 3 \u00d7 3", 0),
        ("factors", "\\boxed{2 \\times 3 \\times 3}", "2 \u00d7 3 \u00d7 3", 1),
        ("roots", "0.4006, -0.3773", "-0.3773, 0.4005", 1),
        ("roots", "0.4007, -0.3773", "-0.3773, 0.4005", 0),
        ("roots", "0.4005", "-0.3773, 0.4005", 0),
        ("roots", "0, 0.5", "0.0, 0.5", 1),
        ("roots", "nan, inf", "0.0, 0.5", 0),
        ("roles", "Amy is a knave, and Zoe is a Knight", ROLES, 1),
        ("roles", "Zoe is a knight and Amy is a knave", ROLES, 1),
        ("roles", "Zoe is a knight, and Amy is a knight.", ROLES, 0),
        ("roles", "Zoe is a knight.", ROLES, 0),
        ("roles", "Zoe is a knight, Zoe is a knave, Amy is a knave", ROLES, 0),
        ("roles", "Zoe is a knight, Amy is a knave, Bob is a knave", ROLES, 0),
        ("grid", GRID, GRID, 1),
        ("grid", f"Here:\n```\n{GRID}\n```", GRID, 1),
        ("grid", f"Answer:\n{GRID}\n\nDone.", GRID, 1),
        ("grid", f"<answer>\n{GRID}\n</answer> ok", GRID, 1),
        ("grid", f"<answer>{GRID}\n1 2 3 4</answer>", GRID, 0),
        ("grid", "2 1 4 3\n3 4 2 2", GRID, 0),
        ("grid", "3 4 2 1", GRID, 0),
        ("grid", f"{GRID}\n1 2 3 4", GRID, 0),
        ("grid", "1 3 4\n4 1 3", FUTOSHIKI, 1),
        ("grid", FUTOSHIKI, FUTOSHIKI, 1),
        ("grid", "So\n[[0, 1],\n [1, 0]]", BOARD, 1),
        ("grid", "Answer: [[0,1],[1,0]]", BOARD, 1),
        ("grid", "[[0, 1], [1, 1]]", BOARD, 0),
        ("grid", "[[0, 1], [1, 0]", BOARD, 0),
    ],
)
def test_rewards_by_rule(rule: str, text: str, answer: str, reward: float) -> None:
    assert rewards.score(f"rg_{rule}", text, answer) == reward


GOLD = {
    "number": "7",
    "fraction": "4/7",
    "word": "Yes",
    "text": "uneeS",
    "list": "b, a",
    "factors": "2 \u00d7 3",
    "roots": "0.0, 0.5",
    "roles": ROLES,
    "grid": GRID,
}


@pytest.mark.parametrize("rule", rewards.RULES)
@pytest.mark.parametrize("form", ["{}", "Answer: {}", "\\boxed{{{}}}", "<answer>{}</answer>", "I think.\n\n{}\n"])
def test_the_gold_answer_counts_in_every_form(rule: str, form: str) -> None:
    said = rewards.judge(f"rg_{rule}", form.format(GOLD[rule]), GOLD[rule])
    assert said.reward == 1.0
    assert said.extracted == rewards.judge(f"rg_{rule}", GOLD[rule], GOLD[rule]).extracted != ""


@pytest.mark.parametrize("rule", rewards.RULES)
@pytest.mark.parametrize(
    "unit",
    ["{", "[[", "9", "-9", "1,", "\\boxed{", "<answer>", "Answer: ", "answer", "1/", " is a ", "\n", "[[1],", " "],
)
def test_odd_long_texts_are_scored_and_earn_nothing(rule: str, unit: str) -> None:
    assert rewards.score(f"rg_{rule}", unit * (400_000 // len(unit)), GOLD[rule]) == 0.0


def test_equal_answers_are_written_alike_when_they_are_wrong_too() -> None:
    said = [rewards.judge("rg_number", text, "7").extracted for text in ("8", "so 8.0", "Answer: 08", "9")]
    assert said == ["8", "8", "8", "9"]
