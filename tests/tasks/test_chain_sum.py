from __future__ import annotations

import re
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from asyncrl import tasks
from asyncrl.errors import TaskError
from asyncrl.sections.task import TaskSection
from asyncrl.tasks.chain_sum import build_items, check_sizes, demonstrations, longest_prompt

SMALL = TaskSection(train_size=200, eval_size=40)


def terms(text: str) -> list[int]:
    return [int(t) for t in re.findall(r"[+-]?\d+", text)]


def test_prompts_answers_and_ids_of_a_built_task(model_dir: Path) -> None:
    task = tasks.build(SMALL, model_dir)
    assert (task.name, len(task.train), len(task.eval), task.stop_token_ids) == ("chain_sum", 200, 40, (1,))
    for prompt in [*task.train, *task.eval]:
        assert re.fullmatch(r"\d([+-]\d){1,4}=", prompt.text)
        assert prompt.answer == str(sum(terms(prompt.text)))
        assert prompt.source == "chain_sum"
        assert prompt.token_ids.dtype == "int32"
        # ids of the folder's tokenizer: digits 2..11, + 12, - 13, = 14
        assert prompt.token_ids.tolist() == ["<pad><eos>0123456789+-=#"[10:].index(c) + 2 for c in prompt.text]
    assert len({p.prompt_id for p in [*task.train, *task.eval]}) == 240


def test_default_sets_are_unique_and_share_no_text() -> None:
    train, held_out = build_items(TaskSection())
    assert (len(train), len(held_out)) == (8192, 400)
    assert len({i.text for i in train}) == 8192
    assert len({i.text for i in held_out}) == 400
    assert not {i.text for i in train} & {i.text for i in held_out}
    assert {len(terms(i.text)) for i in held_out} == {3, 4, 5}
    assert {len(terms(i.text)) for i in train} == {2, 3, 4, 5}


def test_the_mix_of_lengths_does_not_drift_along_the_prompt_order() -> None:
    train, _ = build_items(TaskSection())
    share = [Counter(len(terms(i.text)) for i in part)[2] for part in (train[:4096], train[4096:])]
    assert sum(share) == 200  # there are only 10 * 10 * 2 two-term expressions, and all are in
    assert abs(share[0] - share[1]) < 60  # 100 +- 7 each when shuffled; 200 and 0 in the order drawn


def test_building_is_deterministic_and_ids_depend_on_the_text_only(model_dir: Path) -> None:
    a, b = tasks.build(SMALL, model_dir), tasks.build(SMALL, str(model_dir))
    assert [p.prompt_id for p in a.train] == [p.prompt_id for p in b.train]
    longer = tasks.build(TaskSection(train_size=300, eval_size=40), model_dir)
    ids = {p.text: p.prompt_id for p in longer.train}
    assert all(ids[p.text] == p.prompt_id for p in a.train)
    # the held-out set does not move when the training set grows
    assert [p.text for p in a.eval] == [p.text for p in longer.eval]


def test_seeds_do_not_share_their_items() -> None:
    # reasoning-gym makes item i from Random(seed + i): neighbouring seeds used as they are would
    # give sets that agree in all but one item.
    one = {i.text for i in build_items(TaskSection(seed=1, min_terms=5, train_size=1000, eval_size=1))[0]}
    two = {i.text for i in build_items(TaskSection(seed=2, min_terms=5, train_size=1000, eval_size=1))[0]}
    assert len(one & two) < 20  # 1.6 million expressions: 0.6 shared by chance


def test_digits_are_those_asked_for() -> None:
    train, held_out = build_items(TaskSection(digits=2, train_size=100, eval_size=20))
    assert all(10 <= abs(t) <= 99 for item in [*train, *held_out] for t in terms(item.text))


@pytest.mark.parametrize(
    ("task", "key"),
    [
        # 3 terms: 4000 expressions. All are held out, none is left to train on.
        (TaskSection(min_terms=3, max_terms=3, train_size=201, eval_size=3900), "task.train_size=201"),
        (TaskSection(min_terms=2, max_terms=3, train_size=10, eval_size=4001), "task.eval_size=4001"),
    ],
)
def test_too_few_different_items_are_refused_by_key(task: TaskSection, key: str) -> None:
    with pytest.raises(TaskError, match=key):
        build_items(task)


@pytest.mark.parametrize(
    ("task", "found"),
    [
        # 200 two-term and 4000 three-term expressions; 400 of the latter are held out.
        (TaskSection(max_terms=3, train_size=3801), 3800),
        # Many exist, but they are not found in reasonable time: 4 numbers of terms, 2^19 draws each.
        # 200 + (4000 - 132) + (80_000 * (1 - e^-6.55) - 134) + 1_600_000 * (1 - e^-0.3277) - 134 = 530 800.
        (TaskSection(train_size=10**9), 530_800),
    ],
)
def test_a_set_that_cannot_be_drawn_is_refused_before_any_draw(task: TaskSection, found: int) -> None:
    with pytest.raises(TaskError, match=f"task.train_size={task.train_size}: only ") as caught:
        check_sizes(task)
    (number,) = re.findall(r"only (\d+)", str(caught.value))
    assert abs(int(number) - found) < 100


def test_a_set_that_takes_all_there_is_can_be_drawn() -> None:
    train, held_out = build_items(TaskSection(min_terms=3, max_terms=3, train_size=100, eval_size=3900))
    assert len({i.text for i in [*train, *held_out]}) == 10**3 * 2**2


def test_no_prompt_is_longer_than_its_bound(model_dir: Path) -> None:
    task = TaskSection(min_terms=4, max_terms=4, digits=2, train_size=20, eval_size=4)
    assert {len(i.text) for i in build_items(task)[0]} == {longest_prompt(task, model_dir)} == {12}  # 10+20-30+40=


def test_two_terms_alone_can_be_trained_and_held_out() -> None:
    task = TaskSection(min_terms=2, max_terms=2, eval_min_terms=2, train_size=160, eval_size=40)
    train, held_out = build_items(task)
    assert len({i.text for i in [*train, *held_out]}) == 200
    assert {len(terms(i.text)) for i in held_out} == {2}


def test_demonstrations_hold_no_held_out_expression() -> None:
    task = TaskSection(min_terms=2, max_terms=3, train_size=50, eval_size=2000)
    _, held_out = build_items(task)
    texts = [item.text for item in islice(demonstrations(task), 2000)]
    assert not set(texts) & {i.text for i in held_out}
    assert any(len(terms(t)) == 3 for t in texts)
