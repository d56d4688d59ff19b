"""Each layout that users have, loaded from a file of that layout: the prompt, the gold, what scores it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from asyncrl.errors import TaskError
from asyncrl.sections.task import SourceSection
from asyncrl.tasks.base import Item
from asyncrl.tasks.data.columns import prompt_of, text_of
from asyncrl.tasks.data.gold import answer_of, boxed
from asyncrl.tasks.data.layouts import Wants
from asyncrl.tasks.data.load import load
from tests.tasks import data_files as make

KEY = "task.train[0]"


def one(path: Path, wants: Wants | None = None, **keys: str) -> Item:
    items, counts = load(SourceSection(path=str(path), **keys), KEY, wants or Wants())
    assert counts["rows"] == len(items) == 1
    return items[0]


def columns(name: str, schema: dict[str, pa.DataType], **row: object) -> Callable[[Path], Path]:
    return lambda folder: make.parquet(folder / f"{name}.parquet", [row], schema)


def lines(name: str, **row: object) -> Callable[[Path], Path]:
    return lambda folder: make.jsonl(folder / f"{name}.jsonl", [row])


S, N = pa.string(), pa.int64()
DAPO_TEXT = f"{make.DAPO_HEAD}What is 2+3?{make.DAPO_TAIL}"

LAYOUTS = {
    "DAPO raw": (lambda f: make.dapo(f / "d.parquet", [make.dapo_row("What is 2+3?", "5")]), DAPO_TEXT, "5", "math"),
    "DAPO processed": (lambda f: make.dapo_processed(f / "d.parquet"), "What is 2+3?", "5", "math"),
    "DAPO's AIME-2024": (
        lambda f: make.dapo(f / "aime.parquet", [make.dapo_row("What is 2+3?", "005", source="aime24")]),
        DAPO_TEXT,
        "005",
        "integer",
    ),
    "verl gsm8k": (
        lambda f: make.verl_gsm8k(f / "g.parquet"),
        'Ann has 3 eggs and buys 15. How many? Let\'s think step by step and output the final answer after "####".',
        "18",
        "gsm8k",
    ),
    "verl MATH": (
        lambda f: make.verl_math(f / "m.parquet"),
        "Halve one. Let's think step by step and output the final answer within \\boxed{}.",
        "\\frac{1}{2}",
        "math",
    ),
    "MATH-500": (
        lines("m", problem="Halve one.", solution="It is $\\boxed{\\frac{1}{2}}$.", answer="\\frac{1}{2}",
              subject="Algebra", level=2, unique_id="test/algebra/1.json"),
        "Halve one.",
        "\\frac{1}{2}",
        "math",
    ),
    "MATH-500, a whole number": (
        columns("m", {"problem": S, "solution": S, "answer": S, "subject": S, "level": N, "unique_id": S},
                problem="Add.", solution="\\boxed{12}", answer="12", subject="Algebra", level=2, unique_id="a"),
        "Add.",
        "12",
        "math",
    ),
    "HuggingFaceH4/aime_2024": (
        columns("a", {"id": N, "problem": S, "solution": S, "answer": S, "url": S, "year": S},
                id=60, problem="Every morning", solution="... \\boxed{204}", answer="033", url="u", year="2024"),
        "Every morning",
        "033",
        "integer",
    ),
    "AI-MO/aimo-validation-aime": (
        columns("a", {"id": N, "problem": S, "solution": S, "answer": S, "url": S},
                id=1, problem="Every morning", solution="...", answer="204", url="u"),
        "Every morning",
        "204",
        "integer",
    ),
    "Maxwell-Jia/AIME_2024": (
        columns("a", {"ID": S, "Problem": S, "Solution": S, "Answer": N},
                ID="2024-I-1", Problem="Every morning", Solution="...", Answer=204),
        "Every morning",
        "204",
        "integer",
    ),
    "math-ai/aime25": (lines("a", problem="Find b.", answer="70", id="0"), "Find b.", "70", "integer"),
    "MathArena/aime_2024_I": (
        columns("a", {"problem_idx": N, "problem": S, "answer": N}, problem_idx=1, problem="Find b.", answer=70),
        "Find b.",
        "70",
        "integer",
    ),
    "opencompass/AIME2025": (lines("a", question="Find b.", answer="70"), "Find b.", "70", "integer"),
    "openai/gsm8k": (
        lines("g", question="How many?", answer="600*2=<<600*2=1200>>1,200\n#### 1,200"), "How many?", "1200", "gsm8k"
    ),
    "MATH-lighteval": (
        columns("m", {"problem": S, "solution": S, "level": S, "type": S}, problem="Find x.", level="Level 5",
                type="Algebra", solution="First \\boxed{7}, no: $\\boxed{\\frac{\\sqrt{3}}{2}}$."),
        "Find x.",
        "\\frac{\\sqrt{3}}{2}",
        "math",
    ),
    "SynLogic": (lambda f: make.synlogic(f / "s.parquet"), "Make 24 of 1 2 3 4.", "1*2*3*4", "exact"),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_known_by_its_columns(tmp_path: Path, layout: str) -> None:
    write, text, answer, verifier = LAYOUTS[layout]
    item = one(write(tmp_path))
    assert (item.text, item.answer, item.verifier, item.messages) == (text, answer, verifier, ())
    assert item.where.endswith(("row 1", "line 1"))


def test_whole_instructions_are_known_from_questions(tmp_path: Path) -> None:
    whole = {name: one(LAYOUTS[name][0](tmp_path)).whole for name in ("DAPO raw", "verl gsm8k", "openai/gsm8k")}
    assert whole == {"DAPO raw": True, "verl gsm8k": True, "openai/gsm8k": False}


def test_a_zebra_grid_asks_for_json_and_keeps_its_solution(tmp_path: Path) -> None:
    item = one(make.zebra_grid(tmp_path / "z.parquet"))
    assert item.verifier == "zebra_grid" and item.whole
    assert json.loads(item.answer) == {"header": ["House", "Name"], "rows": [["1", "Eric"], ["2", "Arnold"]]}
    assert item.text.startswith("There are 2 houses. Eric is left of Arnold.\n")
    shape = json.loads(item.text[item.text.index("{") :])
    assert shape["solution"] == {"House 1": {"Name": "___"}, "House 2": {"Name": "___"}}
    assert json.loads(item.extra)["id"] == "lgp-test-2x1-1" and json.loads(item.extra)["size"] == "2*1"


def test_the_same_grid_out_of_json_lines(tmp_path: Path) -> None:
    assert (
        one(make.jsonl(tmp_path / "z.jsonl", [make.zebra_row()])).answer
        == one(make.zebra_grid(tmp_path / "z.parquet")).answer
    )


def test_a_redacted_grid_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"z\.parquet' row 1: column 'solution' is redacted: 2 of its cells"):
        one(make.zebra_grid(tmp_path / "z.parquet", redacted=True))


def test_multiple_choice_is_asked_by_letter(tmp_path: Path) -> None:
    item = one(make.zebra_choice(tmp_path / "c.parquet"))
    assert (item.answer, item.verifier) == ("B", "choice")
    assert item.text == (
        "There are 2 houses. Eric is left of Arnold.\n\nWho lives in House 2?\n\nA) Eric\nB) Arnold\n\n"
        "End with `Answer: ` and the letter of the right choice."
    )


@pytest.mark.parametrize(("answer", "letter"), [("Eric", "A"), ("b", "B"), (1, "B"), ("arnold", "B")])
def test_a_choice_is_given_by_text_letter_or_number(tmp_path: Path, answer: object, letter: str) -> None:
    assert one(make.jsonl(tmp_path / "c.jsonl", [make.CHOICE | {"answer": answer}])).answer == letter


def test_a_choice_that_is_none_of_them_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"column 'answer'='Peter' is none of the choices"):
        one(make.jsonl(tmp_path / "c.jsonl", [make.CHOICE | {"answer": "Peter"}]))


def test_a_choice_set_without_answers_is_refused(tmp_path: Path) -> None:
    row = {k: v for k, v in make.CHOICE.items() if k != "answer"}
    with pytest.raises(TaskError, match=r"has no answer column \(the public copy.*its columns are id, puzzle"):
        one(make.jsonl(tmp_path / "c.jsonl", [row]))


@pytest.mark.parametrize(
    "cell",
    [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}],
        '[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}]',
        np.array([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}], dtype=object),
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "2+3?"}]}],
    ],
    ids=["list", "json", "numpy", "parts"],
)
def test_a_prompt_may_be_a_conversation_in_several_forms(cell: object) -> None:
    assert prompt_of(cell, "here") == (("system", "Be brief."), ("user", "2+3?"))


def test_a_question_that_begins_like_json_stays_a_question() -> None:
    assert prompt_of("[1, 2] is an interval. Its length?", "here") == "[1, 2] is an interval. Its length?"
    assert prompt_of("[1, 2]", "here") == "[1, 2]"


def test_a_conversation_keeps_its_messages(tmp_path: Path) -> None:
    messages = [
        {"role": r, "content": c} for r, c in (("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c"))
    ]
    item = one(make.jsonl(tmp_path / "p.jsonl", [{"prompt": messages, "answer": "5"}]))
    assert (item.text, item.whole) == ("c", True)
    assert item.messages == (("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c"))


@pytest.mark.parametrize(
    ("cell", "text"), [("033", "033"), (33, "33"), (33.0, "33"), (0.5, "0.5"), (["7"], "7"), (-4, "-4")]
)
def test_answers_become_text(cell: object, text: str) -> None:
    assert text_of(cell, "here") == text


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("\\boxed{1} then \\boxed{\\frac{a}{\\sqrt{b}}}", "\\frac{a}{\\sqrt{b}}"),
        ("\\fbox{x}", "x"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed 7", "7"),
        ("so $\\boxed 12.$ Really.", "12"),
        ("\\[\\boxed \\frac{1}{2} \\]", "\\frac{1}{2}"),
        ("is \\boxed 7 then", "7"),
        ("\\boxed{5} and \\boxed{unclosed", "5"),
        ("none", None),
    ],
)
def test_the_last_whole_box(text: str, inside: str | None) -> None:
    assert boxed(text) == inside


@pytest.mark.parametrize(
    ("cell", "gold"), [("so\n#### 1,234,567", "1234567"), ("#### (3,4)", "(3,4)"), ("#### 1,2", "1,2")]
)
def test_commas_behind_hashes_go_where_they_part_thousands(cell: str, gold: str) -> None:
    assert answer_of(cell, "here") == gold


def test_keys_of_the_config_come_before_the_columns(tmp_path: Path) -> None:
    row = {"prompt": "not this", "answer": "0", "meta": {"Ask": "2+3?", "truth": 5}, "other": "6"}
    file = make.jsonl(tmp_path / "f.jsonl", [row])
    item = one(file, prompt_key="meta.ask", answer_key="meta.truth", verifier="last_integer")
    assert (item.text, item.answer, item.verifier) == ("2+3?", "5", "last_integer")
    assert one(file, answer_key="other").answer == "6"


def test_columns_of_csv_and_json(tmp_path: Path) -> None:
    assert one(make.table(tmp_path / "f.csv", [{"Problem": 'a, "b"\nc', "Answer": "033"}])).answer == "033"
    assert one(make.table(tmp_path / "f.csv", [{"Problem": 'a, "b"\nc', "Answer": "7"}])).text == 'a, "b"\nc'
    for tree in ([{"question": "q", "answer": 7}], {"data": [{"question": "q", "answer": 7}]}):
        (tmp_path / "f.json").write_text(json.dumps(tree))
        assert one(tmp_path / "f.json").answer == "7"


def test_what_else_a_row_says_travels_along(tmp_path: Path) -> None:
    file = make.jsonl(
        tmp_path / "f.jsonl",
        [
            {
                "problem": "p",
                "answer": "1",
                "level": 3,
                "unique_id": "u",
                "solution": "s",
                "tests": [1, {"a": float("nan")}],
            }
        ],
    )
    assert json.loads(one(file).extra) == {"id": "u", "level": 3, "unique_id": "u"}
    everything = json.loads(one(file, Wants(answers=False, columns=True)).extra)
    assert everything == {
        "id": "u", "answer": "1", "level": 3, "unique_id": "u", "solution": "s", "tests": [1, {"a": None}]
    }  # fmt: skip


def test_a_gold_may_be_missing_where_the_user_scores(tmp_path: Path) -> None:
    assert one(make.jsonl(tmp_path / "f.jsonl", [{"prompt": "p"}]), Wants(answers=False, columns=True)).answer == ""


def test_a_gold_of_lists_is_json_where_the_user_scores(tmp_path: Path) -> None:
    file = make.jsonl(tmp_path / "f.jsonl", [{"prompt": "p", "answer": [{"in": 1, "out": 2}, {"in": 2, "out": 3}]}])
    assert json.loads(one(file, Wants(answers=False, columns=True)).answer)[1] == {"in": 2, "out": 3}


def test_what_cannot_travel_is_refused(tmp_path: Path) -> None:
    file = make.jsonl(tmp_path / "f.jsonl", [{"prompt": "p", "answer": "1", "tests": "x" * 70_000}])
    assert one(file).extra == ""
    with pytest.raises(TaskError, match=r"line 1: its other columns take 70\d\d\d characters, and at most 65536"):
        one(file, Wants(columns=True))
    (tmp_path / "f.jsonl").write_text('{"prompt": "a \\ud800 b", "answer": "1"}\n')
    with pytest.raises(TaskError, match="line 1: column 'prompt' holds half of a surrogate pair"):
        one(file)


def test_words_as_gold_need_a_verifier(tmp_path: Path) -> None:
    file = make.jsonl(tmp_path / "f.jsonl", [{"question": "Who?", "answer": "Ada Lovelace"}])
    with pytest.raises(TaskError, match=r"line 1: nothing says how.*'Ada Lovelace'.*task\.train\[0\]\.verifier"):
        one(file)
    assert one(file, verifier="exact").verifier == "exact"
