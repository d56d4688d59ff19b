"""The verifier `math`: equal and unequal answers, what the library gets wrong, and odd answers that cost nothing."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from asyncrl.errors import TaskError
from asyncrl.tasks.rewards import judge, score
from asyncrl.tasks.rewards.mathematics import by_library, by_rules, load
from asyncrl.tasks.rewards.numbers import normalise, value_of

# (gold, answer): decided by the rules, without the library.
EQUAL_BY_RULES = [
    ("33", "33"), ("033", "33"), ("33", "033"), ("33", "33."), ("33", "$33$"), ("33", r"\(33\)"), ("33", "+33"),
    ("33", r"\mathbf{33}"), ("33", r"\text{33}"), ("33", "33.0"), ("33", "x=33"), ("33", "m + n = 33"),
    ("-33", "\u221233"), ("0", "-0"), ("1000", "1,000"), ("1000", "1{,}000"), ("1000", r"1\,000"), ("1000", "1 000"),
    ("1,000,000", "1000000"), (r"11,\! 111,\! 111,\! 100", "11111111100"), (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2}", "1/2"), (r"\frac12", r"\dfrac{1}{2}"), ("0.5", ".5"), (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    ("2/4", "1/2"), ("1/3", "0.333333"), ("75", r"75\%"), ("0.75", r"75\%"), (r"75\%", "0.75"), (r"\$18.90", "18.9"),
    ("90", r"90^\circ"), (r"90^{\circ}", "90"), ("5", r"5\text{ cm}"), (r"5\text{ cm}^2", "5"),
    (r"\text{Evelyn}", "Evelyn"), ("Friday", r"\text{friday}"), ("(1,2)", "(1, 2)"), (r"\sqrt{2}", r"\sqrt{2}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"), ("4210_5", "4210_{5}"),
    ("4210_5", "4210"), ("9" * 5000, "9" * 5000), (r"5\text{ million}", "5,000,000"), ("36", r"3\text{ dozen eggs}"),
]  # fmt: skip
UNEQUAL_BY_RULES = [
    ("33", "34"), ("33", "-33"), ("33", "330"), ("33", "3.3"), ("33", "33.0000001"), ("3", "2.9999999"),
    ("12", "12,000"), ("1/3", "0.333"), (r"\frac{1}{2}", r"\frac{2}{1}"), (r"75\%", "7.5"), ("blue", "lube"),
    ("blue", "red"), (r"\text{Friday}", "Saturday"),
    ("7", r"7\text{ or 8}"), ("7", r"7\text{, 8}"), (r"5\text{ million}", "5"), ("5", r"5\text{ dozen eggs}"),
    ("4210_5", "4210_6"), ("4210_5", "4211"), ("(1,2)", r"\{1,2\}"),
    ("9" * 5000, "9" * 4999 + "8"), ("2", "(" * 400 + "2" + ")" * 400), ("2", "9" * 1_000_000),
]  # fmt: skip
EQUAL_BY_LIBRARY = [
    (r"\sqrt{2}", "2^{1/2}"), (r"2\sqrt{3}", r"\sqrt{12}"), ("(x+1)^2", "x^2+2x+1"), (r"\frac{\pi}{2}", r"\pi/2"),
    ("1024", "2^{10}"), ("6", "3!"), ("a+b", "b+a"), ("p - q", "-(q - p)"), ("3+2i", "2i+3"), ("1,2", "2,1"),
    (r"(3, \frac{\pi}{2})", r"(3,\pi/2)"), ("1500", r"1.5\times 10^{3}"), (r"1\frac{1}{2}", "1.5"),
    ("x<2", r"(-\infty,2)"), (r"(-\infty, 2)", "x<2"), (r"[1,2]", r"1 \le x \le 2"),
    ("y=2x+1", "2x+1"), ("5", "5 cm"), ("C", r"\text{(C)}"),
]  # fmt: skip
UNEQUAL_BY_LIBRARY = [
    ("x+1", "y+1"), ("[0,1)", "[0,1]"), ("7", "7 or 8"), ("7", "7, 8"), ("12", "12 and 15"), ("12", "1 2"),
    ("1", "1/0"), ("m=3", "n=3"), (r"\infty", r"-\infty"), ("(1,2,3)", "(3,2,1)"), (r"\log 2", r"\ln 2"), ("5", "5x"),
    ("3", "three"),
    (r"\sqrt{2}", "1.41"), ("3", ""), ("3", r"\frac{}{}"),
]  # fmt: skip


def decided(gold: str, answer: str) -> bool | None:
    plain = normalise(gold)
    return by_rules(plain, value_of(plain), normalise(answer))


@pytest.mark.parametrize(("gold", "answer"), EQUAL_BY_RULES)
def test_answers_that_the_rules_find_equal(gold: str, answer: str) -> None:
    assert decided(gold, answer) is True
    assert score("math", f"so it is \\boxed{{{answer}}}.", gold) == 1.0


@pytest.mark.parametrize(("gold", "answer"), UNEQUAL_BY_RULES)
def test_answers_that_the_rules_find_different(gold: str, answer: str) -> None:
    assert decided(gold, answer) is False
    assert score("math", f"so it is \\boxed{{{answer}}}.", gold) == 0.0


@pytest.mark.parametrize(("gold", "answer"), EQUAL_BY_LIBRARY)
def test_answers_that_only_the_library_finds_equal(gold: str, answer: str) -> None:
    assert decided(gold, answer) is None
    assert score("math", f"so it is \\boxed{{{answer}}}.", gold) == 1.0


@pytest.mark.parametrize(("gold", "answer"), UNEQUAL_BY_LIBRARY)
def test_answers_that_only_the_library_finds_different(gold: str, answer: str) -> None:
    assert score("math", f"so it is \\boxed{{{answer}}}.", gold) == 0.0


def library(gold: str, answer: str, wrap: bool = True) -> bool:
    """What math-verify says by itself, as most users call it."""
    lib = load()
    read = [lib.parse(f"\\boxed{{{part}}}" if wrap else part) for part in (gold, answer)]
    return bool(lib.verify(*read))


@pytest.mark.parametrize(
    ("gold", "answer", "wrap", "theirs", "ours"),
    [
        (r"\sqrt{2}", r"\sqrt{2}", False, False, 1.0),  # a bare gold answer is read as nothing, and equals nothing
        ("(1,2)", "(1,2)", False, False, 1.0),
        ("12", "12.", True, False, 1.0),
        ("1000", "1 000", True, False, 1.0),
        (r"(-\infty, 2)", "x<2", True, False, 1.0),  # the other way round they are equal
        ("(1,2)", r"\{1,2\}", True, True, 0.0),  # a point is no set
        ("blue", "lube", True, True, 0.0),  # a word is no product of its letters
        ("4210_5", "4210_6", True, True, 0.0),  # a base is part of a number
    ],
)
def test_wrong_verdicts_of_the_library_are_not_ours(
    gold: str, answer: str, wrap: bool, theirs: bool, ours: float
) -> None:
    assert library(gold, answer, wrap) is theirs
    assert score("math", f"\\boxed{{{answer}}}", gold) == ours


@pytest.mark.parametrize(
    ("gold", "answer"),
    [("ab", "ba"), ("2", r"\{2\}"), ("y=2x+1", "2x+1"), ("10:30", "20:60"), ("1 cm", r"1\text{ m}")],
)
def test_lenient_verdicts_that_we_keep(gold: str, answer: str) -> None:
    assert library(gold, answer) is True
    assert score("math", f"\\boxed{{{answer}}}", gold) == 1.0


@pytest.mark.parametrize(
    ("text", "gold", "reward", "extracted"),
    [
        (r"\boxed{1} then \boxed{2}", "2", 1.0, "2"),  # the last box counts
        (r"\boxed{1} then \boxed{2}", "1", 0.0, "2"),
        (r"\boxed{\frac{1}{\sqrt{4}}}", "0.5", 1.0, r"\frac{1}{\sqrt{4}}"),
        (r"\boxed{\{1, 2\}}", "2, 1", 1.0, r"\{1,2\}"),  # an escaped brace closes nothing
        (r"\boxed{12", "12", 1.0, "12"),  # not closed: no box, so the last integer of the text
        (r"\boxed{12", r"\frac{1}{2}", 0.0, None),
        ("Answer: 7", "7", 1.0, "7"),
        ("**Answer:** 7\n", "7", 1.0, "7"),
        ("**Final Answer:** $\\frac{1}{2}$", "0.5", 1.0, "1/2"),
        ("Answer: 6\nno,\nanswer: 7", "7", 1.0, "7"),
        (r"\boxed{6}, wait. Answer: 7", "7", 1.0, "7"),  # whichever mark comes last
        (r"Answer: 6? Let me see: \boxed{7}", "7", 1.0, "7"),
        (r"Answer: it is \boxed{7} apples", "7", 1.0, "7"),
        ("I think it is 7 of them.", "7", 1.0, "7"),
        ("6 or 7", "6", 0.0, "7"),
        ("so x equals\n$\\sqrt{2}$\n", r"\sqrt{2}", 1.0, r"\sqrt{2}"),  # no mark: the last line
        ("", "7", 0.0, ""),
        (None, "7", 0.0, ""),
    ],
)
def test_where_the_answer_is_found(text: str | None, gold: str, reward: float, extracted: str | None) -> None:
    found = judge("math", text, gold)
    assert found.reward == reward
    assert extracted is None or found.extracted == extracted


def test_equal_answers_are_extracted_alike() -> None:
    written = ["1/2", r"\frac12", r"\dfrac{1}{2}", "0.50", r"\frac{2}{4}", r"$ .5 $"]
    assert {judge("math", f"\\boxed{{{w}}}", "3").extracted for w in written} == {"1/2"}
    assert len(judge("math", "\\boxed{" + "x" * 2000 + "}", "3").extracted) == 256


def test_an_empty_gold_answer_is_an_error() -> None:
    with pytest.raises(TaskError, match="gold answer is empty"):
        score("math", "7", " ")


def test_odd_answers_are_not_handed_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case B63: brackets and digits without end are compared as text."""
    monkeypatch.setattr("asyncrl.tasks.rewards.mathematics.by_library", lambda *a: pytest.fail("asked the library"))
    for odd in ("(" * 400 + "1" + ")" * 400, "9" * 1_000_000, "\\frac{" * 400 + "}" * 400, "{" * 500_000):
        for text in (odd, f"\\boxed{{{odd}}}", f"Answer: {odd}", "\\boxed{" * 100 + odd):
            assert score("math", text, "7") == 0.0


def test_a_library_that_does_not_finish_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.tasks.rewards.mathematics.LIBRARY_S", 1)
    with pytest.raises(TimeoutError, match="math-verify did not finish within 1 s"):
        by_library("7", r"\sum_{n=1}^{10^{9}} \frac{n!}{n^2+1}")


# Field case B62: a right answer scores 1 wherever it is scored. The pool's tests add its own processes.
CASES = [("7", r"\boxed{7}"), (r"\sqrt{12}", r"\boxed{2\sqrt{3}}")]


@pytest.mark.parametrize(("gold", "text"), CASES)
def test_a_right_answer_scores_1_on_every_kind_of_thread(gold: str, text: str) -> None:
    assert score("math", text, gold) == 1.0
    got: list[float] = []
    thread = threading.Thread(target=lambda: got.append(score("math", text, gold)))
    thread.start()
    thread.join(60.0)
    assert got == [1.0]

    async def executor() -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, score, "math", text, gold)

    assert asyncio.run(executor()) == 1.0


def test_a_right_answer_scores_1_in_a_spawned_process() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        found = [processes.submit(score, "math", text, gold).result(timeout=90) for gold, text in CASES]
    assert found == [1.0, 1.0]
