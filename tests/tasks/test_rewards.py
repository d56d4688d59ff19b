from __future__ import annotations

import asyncio
import threading

import pytest

from asyncrl.errors import TaskError
from asyncrl.tasks import rewards
from asyncrl.tasks.rewards import Verifier, score


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("+0=3+7=10-4=6#6", "6", 1.0),
        ("#6", "6", 1.0),
        ("#-3", "-3", 1.0),
        ("#5#6", "6", 1.0),  # the last one counts
        ("#6#5", "6", 0.0),
        ("6", "6", 0.0),  # no mark
        ("", "6", 0.0),
        (None, "6", 0.0),
        ("#", "6", 0.0),
        ("#16", "6", 0.0),  # contains the answer
        ("#6=", "6", 0.0),
        ("#06", "6", 0.0),
        ("6#", "6", 0.0),
        ("#" + "9" * 1_000_000, "6", 0.0),
    ],
)
def test_chain_sum_pays_for_the_number_after_the_last_hash(text: str | None, answer: str, reward: float) -> None:
    assert score("chain_sum", text, answer) == reward


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("7", "7", 1.0),
        ("The answer is 7.", "7", 1.0),
        ("3 + 4 = **7**", "7", 1.0),
        ("\\boxed{7}", "7", 1.0),
        ("007", "7", 1.0),
        ("it is 1,234!", "1234", 1.0),
        ("5-7=-2", "-2", 1.0),
        ("(-2)", "-2", 1.0),
        ("\u22122", "-2", 1.0),  # the minus of typesetting
        ("-0", "0", 1.0),
        ("9" * 20_000, "9" * 20_000, 1.0),
        ("7 or 8", "7", 0.0),  # the last one counts
        ("5-7", "-7", 0.0),  # a minus between numbers is none of the number
        ("5-7", "7", 1.0),
        ("2", "-2", 0.0),
        ("-2", "2", 0.0),
        ("77", "7", 0.0),
        ("7.5", "7", 0.0),
        ("0.7", "7", 0.0),
        ("1/7", "7", 0.0),
        ("7/1", "7", 0.0),
        ("x7", "7", 0.0),
        ("7th", "7", 0.0),
        ("7e3", "7", 0.0),
        ("1,2345", "12345", 0.0),
        ("seven", "7", 0.0),
        ("", "7", 0.0),
        (None, "0", 0.0),
    ],
)
def test_the_last_integer_of_a_response_counts(text: str | None, answer: str, reward: float) -> None:
    assert score("last_integer", text, answer) == reward


def test_unknown_source_is_refused() -> None:
    with pytest.raises(TaskError, match=r"no verifier for source 'sudoku'.*chain_sum"):
        score("sudoku", "#1", "1")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, 1.5])
def test_values_outside_0_1_are_errors(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    monkeypatch.setitem(rewards.VERIFIERS, "odd", Verifier(lambda text, answer: value, gold=str))
    with pytest.raises(TaskError, match="odd"):
        score("odd", "x", "y")


def test_same_reward_on_every_kind_of_thread() -> None:
    """Field case B62: a verifier that needs the main thread pays 0 elsewhere. The pool's test adds processes."""
    got: list[float] = []
    thread = threading.Thread(target=lambda: got.append(score("chain_sum", "#6", "6")))
    thread.start()
    thread.join(10.0)
    got.append(asyncio.run(_in_executor()))
    assert got == [1.0, 1.0]


async def _in_executor() -> float:
    return await asyncio.get_running_loop().run_in_executor(None, score, "chain_sum", "#6", "6")
