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
