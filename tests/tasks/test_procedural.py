"""Field cases B65 and B66: procedural tasks pay for the right answer alone, and held-out prompts are held out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from asyncrl.errors import TaskError
from asyncrl.tasks import gate, procedural, rewards
from asyncrl.tasks.procedural.names import RULES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "procedural.md"
COSTLY = {"acre", "futoshiki", "polynomial_equations", "sudoku", "zebra_grid", "zebra_puzzles"}


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # reasoning-gym's arc_agi leaves one open
@pytest.mark.parametrize("name", procedural.NAMES)
def test_every_procedure_passes_the_gate(name: str) -> None:
    size = 2 if name in COSTLY else 16
    train = procedural.items(name, {}, size, seed=5, held_out=False)
    held_out = procedural.items(name, {}, size, seed=5, held_out=True)
    gate.check(name, [*train, *held_out])
    assert {len(train), len({item.text for item in [*train, *held_out]}) // 2} == {size}


@pytest.mark.parametrize("name", ["chain_sum", "game_of_life_halting", "prime_factorization", "mini_sudoku"])
def test_the_scorers_of_the_library_would_not_pass(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from reasoning_gym import create_dataset

    dataset = create_dataset(name, seed=5, size=8)
    entries = {entry["question"]: entry for entry in dataset}
    by_answer = {entry["answer"]: entry for entry in entries.values()}
    theirs = rewards.Verifier(lambda text, answer: float(dataset.score_answer(text, by_answer[answer])), gold=str)
    monkeypatch.setitem(rewards.VERIFIERS, "theirs", theirs)
    found = [procedural.Item(text, entry["answer"]) for text, entry in entries.items()]
    with pytest.raises(TaskError, match=f"'{name}' with verifier 'theirs'"):
        gate.check("theirs", found, task=name)


SMALL: list[tuple[str, Mapping[str, object]]] = [
    ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
    ("gcd", {"max_value": 12}),
    ("syllogism", {}),
]


@pytest.mark.parametrize(("name", "options"), SMALL)
def test_no_text_is_shared_between_training_and_held_out_sets_of_any_seeds(
    name: str, options: Mapping[str, object]
) -> None:
    size = 40
    train = [{i.text for i in procedural.items(name, options, 2 * size, seed, held_out=False)} for seed in (0, 1, 7)]
    held_out = [{i.text for i in procedural.items(name, options, size, seed, held_out=True)} for seed in (0, 1, 7)]
    assert all(len(texts) == 2 * size for texts in train)
    assert all(len(texts) == size for texts in held_out)
    assert not set.union(*train) & set.union(*held_out)


def test_neighbouring_seeds_do_not_share_their_items() -> None:
    # Used as they are, seeds 0 and 100 of the library share nearly all of their first thousand items.
    options = {"min_terms": 5, "max_terms": 6}
    one, two = ({i.text for i in procedural.items("chain_sum", options, 500, s, held_out=False)} for s in (0, 1))
    assert not one & two


def test_a_set_is_a_function_of_its_arguments() -> None:
    shorter, longer = (procedural.items("gcd", {}, size, seed=3, held_out=False) for size in (20, 60))
    assert shorter == longer[:20]
    assert [i.verifier for i in shorter] == ["rg_number"] * 20


def test_items_are_the_same_in_every_process() -> None:
    # Some of the library's datasets iterate over sets, whose order is another in each process.
    code = (
        "import json, asyncrl.tasks.procedural as p\n"
        "names = ('knights_knaves', 'zebra_grid', 'acre', 'syllogism')\n"
        "print(json.dumps([p.items(n, {}, 6, 2, False) for n in names]))"
    )
    found = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=300,
        ).stdout.splitlines()[-1]
        for seed in ("1", "2")
    ]
    assert json.loads(found[0]) == json.loads(found[1])


def test_a_large_seed_makes_items() -> None:
    assert len(procedural.items("chain_sum", {}, 3, seed=2**31 - 1, held_out=True)) == 3


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("chainsum", {}, r"task.train\[1\].procedural='chainsum' .*did you mean 'chain_sum'"),
        (
            "propositional_logic",
            {},
            "procedural='propositional_logic' is a dataset of reasoning-gym that is not enabled: no gold",
        ),
        (
            "gcd",
            {"min_number": 2},
            r"task.train\[1\].options.min_number is no option of gcd; did you mean 'min_numbers'",
        ),
        ("gcd", {"seed": 2}, r"options.seed is no option of gcd"),
        ("chain_sum", {"min_terms": 5, "max_terms": 3}, r"task.train\[1\].options=.* refused by chain_sum"),
        ("chain_sum", {"min_terms": "many"}, r"task.train\[1\].options=.* refused by chain_sum"),
        ("zebra_grid", {"size": "3*9"}, r"options.size='3\*9' must be HOUSES\*FEATURES"),
        ("zebra_grid", {"houses": 3}, "options.houses is unknown to zebra_grid"),
    ],
)
def test_wrong_names_and_options_are_refused_by_key(name: str, options: Mapping[str, object], error: str) -> None:
    for build in (
        lambda: procedural.check(name, options, "task.train[1]"),
        lambda: procedural.items(name, options, 4, 0, held_out=False, key="task.train[1]"),
    ):
        with pytest.raises(TaskError, match=error):
            build()


def test_too_few_different_texts_are_refused_by_key() -> None:
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(TaskError, match=r"task.eval\[0\].size=190: only \d+ different held-out items of chain_sum"):
        procedural.items("chain_sum", options, 190, 0, held_out=True, key="task.eval[0]")


def test_no_text_gives_its_answer_away() -> None:
    # A quarter of the rotations are by a multiple of 360 degrees: their answer is the end of their question.
    for item in procedural.items("rotate_matrix", {}, 60, 0, held_out=False):
        assert rewards.score(item.verifier, item.text, item.answer) == 0.0


def test_a_zebra_grid_asks_for_the_grid_that_is_its_gold() -> None:
    (item,) = procedural.items("zebra_grid", {"size": "3*4"}, 1, seed=1, held_out=False)
    gold = json.loads(item.answer)
    assert gold["header"][:2] == ["House", "Name"]
    assert [row[0] for row in gold["rows"]] == ["1", "2", "3"]
    assert {len(row) for row in gold["rows"]} == {5}
    assert item.verifier == "zebra_grid"
    # Every cell is one of the values that the puzzle lists, and the form names every column of every house.
    assert all(cell in item.text for row in gold["rows"] for cell in row[1:])
    form = json.loads(item.text[item.text.index("{") :])
    assert set(form["solution"]) == {"House 1", "House 2", "House 3"}
    assert list(form["solution"]["House 3"]) == gold["header"][1:]


def test_the_example_mixture_names_procedures_and_options_that_exist() -> None:
    from asyncrl.config import load_config

    task = load_config([ROOT / "configs" / "procedural.yaml"], []).task
    assert {source.procedural for source in task.train} >= {"gsm_symbolic", "zebra_grid"}
    for source in (*task.train, *task.eval):
        procedural.check(source.procedural or "", source.options)


def test_importing_and_naming_is_cheap() -> None:
    code = (
        "import sys, asyncrl.tasks.procedural as p, asyncrl.tasks.procedural.rules, asyncrl.tasks.zebra\n"
        "p.check('gcd', {}); p.check('zebra_grid', {'size': '2*3'})\n"
        "assert not {'reasoning_gym', 'sympy', 'torch', 'transformers'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_docs_say_of_every_dataset_whether_it_is_enabled() -> None:
    import reasoning_gym  # noqa: F401  (fills the registry)
    from reasoning_gym.factory import DATASETS

    enabled, _, excluded = DOCS.read_text().partition("## Not enabled")
    named = [set(re.findall(r"`([a-z0-9_]+)`", text)) for text in (enabled, excluded)]
    assert set(RULES) <= named[0]
    assert set(DATASETS) - set(RULES) == named[1] & set(DATASETS)
