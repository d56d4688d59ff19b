"""Field case B65: a verifier that pays for junk must not reach training."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asyncrl.errors import TaskError
from asyncrl.tasks import gate, rewards
from asyncrl.tasks.base import Item
from asyncrl.tasks.rewards import Verifier

ITEMS = [Item("3+0+7-4=", "6"), Item("1-9=", "-8")]


def exact(text: str, answer: str) -> float:
    return float(text == answer)


def pays_for_any_text(text: str, answer: str) -> float:
    return float(bool(text) == bool(answer))


def pays_for_substrings(text: str, answer: str) -> float:
    return len(answer) / len(text) if answer in text else 0.0


def pays_for_nothing(text: str, answer: str) -> float:
    return 1.0 if text == answer or not text else 0.0


def raises_on_junk(text: str, answer: str) -> float:
    return float(int(text) == int(answer)) if text else 0.0


def beyond_one(text: str, answer: str) -> float:
    return 2.0 * (text == answer)


def never(text: str, answer: str) -> float:
    return 0.0


def nan_for_nan(text: str, answer: str) -> float:
    return float("nan") if text == "nan" else exact(text, answer)


def test_chain_sum_and_an_exact_verifier_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    gate.check("chain_sum", ITEMS)
    monkeypatch.setitem(rewards.VERIFIERS, "mine", Verifier(exact, gold=str))
    gate.check("mine", ITEMS)


def test_a_rule_that_finds_the_answer_anywhere_passes_only_when_it_reads_numbers_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    items = [*ITEMS, Item("4-2=", "2"), Item("9-9=", "0"), Item("0-0=", "0")]
    gate.check("last_integer", items)
    strict = rewards.VERIFIERS["last_integer"]._replace(anywhere=False)
    monkeypatch.setitem(rewards.VERIFIERS, "mine", strict)
    with pytest.raises(TaskError, match="junk response 'maybe 6 or not'"):
        gate.check("mine", items)
    monkeypatch.setitem(rewards.VERIFIERS, "mine", Verifier(lambda t, a: float(a in t), gold=str, anywhere=True))
    with pytest.raises(TaskError, match=r"junk response '660' .*scores 1.0"):
        gate.check("mine", items)


@pytest.mark.parametrize(
    ("scorer", "reason"),
    [
        (pays_for_any_text, "junk response .* scores 1.0"),
        (pays_for_substrings, "junk response .* scores 0"),
        (pays_for_nothing, "empty response .* does not score 0"),
        (raises_on_junk, "raised ValueError"),
        (beyond_one, r"rewards lie in \[0, 1\]"),
        (never, "gold response .* does not score 1"),
        (nan_for_nan, "nan"),
    ],
)
def test_unsafe_verifiers_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, scorer: Callable[[str, str], float], reason: str
) -> None:
    monkeypatch.setitem(rewards.VERIFIERS, "mine", Verifier(scorer, gold=str))
    with pytest.raises(TaskError, match=f"(?s)'mine'.*{reason}|{reason}.*'mine'"):
        gate.check("mine", ITEMS)


def test_items_are_gated_by_their_own_verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rewards.VERIFIERS, "mine", Verifier(exact, gold=str))
    monkeypatch.setitem(rewards.VERIFIERS, "any", Verifier(pays_for_any_text, gold=str))
    gate.check("any", [item._replace(verifier="mine") for item in ITEMS], task="sums")
    with pytest.raises(TaskError, match=r"task 'sums' with verifier 'any'.*junk"):
        gate.check("mine", [ITEMS[0], ITEMS[1]._replace(verifier="any")], task="sums")


def test_an_answer_that_the_verifier_cannot_use_is_refused_by_name() -> None:
    with pytest.raises(TaskError, match="task 'grids' with verifier 'zebra_grid': its verifier cannot use the answer"):
        gate.check("zebra_grid", [Item("a puzzle", "5")], task="grids")


def test_an_answer_that_is_a_word_of_the_junk_may_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def any_case(text: str, answer: str) -> float:
        return float(text.casefold() == answer.casefold())

    monkeypatch.setitem(rewards.VERIFIERS, "mine", Verifier(any_case, gold=str))
    gate.check("mine", [Item("Is it so?", "true"), Item("Is it not?", "False")])


def test_items_without_an_answer_and_empty_tasks_are_refused() -> None:
    with pytest.raises(TaskError, match=r"'chain_sum'.*no answer"):
        gate.check("chain_sum", [Item("1+1=", "")])
    with pytest.raises(TaskError, match=r"'chain_sum'.*no items"):
        gate.check("chain_sum", [])


def test_a_task_is_gated_when_it_is_built(monkeypatch: pytest.MonkeyPatch, model_dir: str) -> None:
    from asyncrl import tasks
    from asyncrl.sections.task import TaskSection

    monkeypatch.setitem(rewards.VERIFIERS, "chain_sum", Verifier(pays_for_any_text, gold=str))
    with pytest.raises(TaskError, match=r"'chain_sum'.*junk"):
        tasks.build(TaskSection(train_size=8, eval_size=8), model_dir)
