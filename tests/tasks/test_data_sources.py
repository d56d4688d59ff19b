"""Prompts out of users' files: what is left out and counted, held-out questions apart, chat, names, subsets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl import tasks
from asyncrl.errors import TaskError
from asyncrl.replay.snapshot import data_fingerprint
from asyncrl.sections.task import SourceSection, TaskSection
from asyncrl.tasks import rewards
from asyncrl.tasks.base import Task
from asyncrl.tasks.names import names_of
from tests.tasks import data_files as make
from tests.tasks.conftest import write_tokenizer
from tests.tasks.test_chat import CHATML, write_chat_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A byte-level tokenizer with the template of ChatML: a token per byte."""
    (tmp_path / "model").mkdir()
    return write_chat_folder(tmp_path / "model", CHATML)


def problems(path: Path, *questions: str, answer: str = "1") -> str:
    return str(make.jsonl(path, [{"problem": q, "answer": answer} for q in questions]))


def build(model: Path, train: Sequence[Any], held_out: Sequence[Any] = (), **keys: Any) -> Task:
    section = TaskSection.model_validate({"name": "sources", "train": train, "eval": held_out, **keys})
    tasks.check(section)
    return tasks.build(section, model)


def test_prompts_of_a_file(tmp_path: Path, model: Path) -> None:
    train = {"path": str(make.dapo(tmp_path / "dapo.parquet", [make.dapo_row("What is 2+3?", "5")]))}
    held_out = {"path": problems(tmp_path / "aime.jsonl", "Find b.", answer="070")}
    task = build(model, [train], [held_out], template="Think. {question}")
    (prompt,), (asked,) = task.train, task.eval
    # a whole instruction is left as it is, a question gets the template
    assert prompt.text == f"{make.DAPO_HEAD}What is 2+3?{make.DAPO_TAIL}" and asked.text == "Think. Find b."
    assert (prompt.answer, prompt.source, prompt.data_source) == ("5", "math", "dapo")
    assert (asked.answer, asked.source, asked.data_source) == ("070", "integer", "aime")
    assert prompt.prompt_id.startswith("dapo-") and '"id": "u-1"' in prompt.extra
    assert len(prompt.token_ids) == len(prompt.text)
    assert (task.stop_token_ids, task.counts, task.weights) == ((1, 0), {}, {"dapo": 1.0})


def test_a_source_of_its_own_template_and_weight(tmp_path: Path, model: Path) -> None:
    row = make.dapo(tmp_path / "d.parquet", [make.dapo_row("q", "5")])
    sources = [
        {"path": str(row), "template": "<< {question} >>", "weight": 3},
        {"path": problems(tmp_path / "p.jsonl", "a"), "name": "mine", "template": "{question}!"},
    ]
    task = build(model, sources, template="unused {question}")
    assert [p.text[:3] + p.text[-3:] for p in task.train] == ["<<  >>", "a!a!"]
    assert task.weights == {"d": 3.0, "mine": 1.0}


def test_chat_with_a_system_message(tmp_path: Path, model: Path) -> None:
    messages = [
        {"role": r, "content": c} for r, c in (("system", "Old."), ("user", "a"), ("assistant", "b"), ("user", "c"))
    ]
    talk = str(make.jsonl(tmp_path / "talk.jsonl", [{"prompt": messages, "answer": "1"}]))
    plain = problems(tmp_path / "plain.jsonl", "q")
    head = "<|im_start|>{}\n{}<|im_end|>\n"
    asked = (
        head.format("user", "a") + head.format("assistant", "b") + head.format("user", "c") + "<|im_start|>assistant\n"
    )

    task = build(model, [{"path": talk}, {"path": plain}], chat=True, system_prompt="New.")
    # that of the file stays, unless the source itself has another
    assert [p.text for p in task.train] == [
        head.format("system", "Old.") + asked,
        head.format("system", "New.") + head.format("user", "q") + "<|im_start|>assistant\n",
    ]
    task = build(model, [{"path": talk, "system_prompt": "Mine.", "template": "[{question}]"}], chat=True)
    assert task.train[0].text == head.format("system", "Mine.") + asked.replace("\nc<", "\n[c]<")
    assert build(model, [{"path": talk}]).train[0].text == "Old.\n\na\n\nb\n\nc"  # without chat


def test_a_template_that_drops_the_system_message_is_refused(tmp_path: Path, model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(TaskError, match="leaves the system message out"):
        build(model, [{"path": problems(tmp_path / "p.jsonl", "q")}], chat=True, system_prompt="s")


def test_what_is_left_out_is_counted_by_source_and_reason(tmp_path: Path, model: Path) -> None:
    questions = ["a", "b" * 40, "c <|im_end|>", "a", "d"]
    task = build(
        model,
        [{"path": problems(tmp_path / "one.jsonl", *questions)}, {"path": problems(tmp_path / "two.jsonl", "d", "e")}],
        [{"path": problems(tmp_path / "test.jsonl", "f", "g" * 40)}],
        max_prompt_tokens=30,
    )
    assert [(p.data_source, p.text) for p in task.train] == [("one", "a"), ("one", "d"), ("two", "e")]
    assert task.counts == {
        "one/duplicate": 1, "one/overlong": 1, "one/special_token": 1, "two/elsewhere": 1, "eval/test/overlong": 1
    }  # fmt: skip
    assert task.notes[0].startswith("task.train[0] one: 2 prompts of up to 1 tokens from 5 rows of ")
    assert f"overlong 1 (first: '{tmp_path}/one.jsonl' line 2)" in task.notes[0]
    assert f"special_token 1 (first: '{tmp_path}/one.jsonl' line 3)" in task.notes[0]


def test_a_source_of_which_nothing_is_left_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(TaskError, match=r"no prompt is left of task\.train\[0\].*overlong 1.*max_prompt_tokens=3 "):
        build(model, [{"path": problems(tmp_path / "p.jsonl", "long")}], max_prompt_tokens=3)


def test_rows_that_the_tokenizer_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    folder = write_tokenizer(tmp_path / "digits", ["<eos>", *"0123456789+= "])
    good = [f"{i}+1=" for i in range(20)]
    task = build(folder, [{"path": problems(tmp_path / "p.jsonl", *good, "x+1=")}])
    assert len(task.train) == 20 and task.counts == {"p/unwritable": 1}
    assert "unwritable 1 (first: " in task.notes[0] and "line 21)" in task.notes[0]
    with pytest.raises(TaskError, match=r"cannot write 3 of 23 prompts, first .* line 21"):
        build(folder, [{"path": problems(tmp_path / "p.jsonl", *good, "x", "y", "z")}])


def test_a_size_takes_a_seeded_part_whatever_the_order(tmp_path: Path, model: Path) -> None:
    questions = [f"question {i}" for i in range(300)]
    paths = problems(tmp_path / "a.jsonl", *questions), problems(tmp_path / "b.jsonl", *reversed(questions))

    def part(path: str, seed: int, size: int = 20) -> list[str]:
        task = build(model, [{"path": path, "size": size, "name": "x"}], seed=seed)
        assert task.counts == {"x/unused": 300 - size}
        return [p.text for p in task.train]

    assert len(set(part(paths[0], 1))) == 20
    assert sorted(part(paths[0], 1)) == sorted(part(paths[1], 1)) != sorted(part(paths[0], 2))
    assert set(part(paths[0], 1)) < set(part(paths[0], 1, 40))
    texts = part(paths[0], 1)
    assert texts == sorted(texts, key=questions.index)  # in the order of the file


def test_a_size_counts_prompts_that_fit(tmp_path: Path, model: Path) -> None:
    questions = [f"{'long ' * (i % 2 * 20)}question {i}" for i in range(100)]
    task = build(model, [{"path": problems(tmp_path / "a.jsonl", *questions), "size": 40}], max_prompt_tokens=30)
    assert len(task.train) == 40 and not any("long" in p.text for p in task.train)


def test_shared_questions_of_train_and_eval_are_refused(tmp_path: Path, model: Path) -> None:
    # B66 for files: held-out accuracy must not measure memory, whoever wrote the files.
    train = make.dapo(tmp_path / "train.parquet", [make.dapo_row("What  is 2+3?", "5"), make.dapo_row("other", "1")])
    test = problems(tmp_path / "test.jsonl", "new", "what is\n2+3?", answer="5")
    with pytest.raises(TaskError) as caught:
        build(model, [{"path": str(train)}], [{"path": test}])
    said = str(caught.value)
    assert said.startswith(
        f"task.eval[0] ({test}) shares 1 of its questions with task.train[0] ({train}), for example "
    )
    assert "'what is 2+3?'" in said and "test.jsonl' line 2 and " in said and "train.parquet' row 1)" in said
    assert "remove them from one of the files" in said


def test_ids_follow_from_source_and_text_alone(tmp_path: Path, model: Path) -> None:
    one = build(model, [{"path": problems(tmp_path / "p.jsonl", "a", "b")}])
    two = build(model, [{"path": problems(tmp_path / "p.jsonl", "c", "b", "a")}])
    ids = {p.text: p.prompt_id for p in two.train}
    assert [ids[p.text] for p in one.train] == [p.prompt_id for p in one.train]
    assert len({*ids.values()}) == 3


def test_names_are_made_of_files_and_procedures_and_differ() -> None:
    sections = [
        SourceSection(path="data/dapo-math-17k.parquet"),
        SourceSection(path="more/dapo-math-17k.parquet"),
        SourceSection(path="gsm8k/*.parquet"),
        SourceSection(path="x/part *.jsonl", name="dapo-math-17k-3"),
        SourceSection(procedural="zebra_grid"),
    ]
    assert names_of(sections) == ["dapo-math-17k", "dapo-math-17k-2", "gsm8k", "dapo-math-17k-3", "zebra_grid"]


def test_a_gold_that_its_verifier_cannot_use_is_refused(tmp_path: Path, model: Path) -> None:
    path = problems(tmp_path / "p.jsonl", "a", answer="\\frac{1}{2}")
    with pytest.raises(TaskError, match=r"task\.train\[0\]: .*line 1: verifier 'integer' cannot use the answer"):
        build(model, [{"path": path, "verifier": "integer"}])
    with pytest.raises(TaskError, match=r"task\.train\[0\]\.verifier='maths' is no verifier; did you mean 'math'"):
        build(model, [{"path": path, "verifier": "maths"}])
    with pytest.raises(TaskError, match=r"task\.train\[0\]\.verifier='user' is task\.reward, which is not set"):
        build(model, [{"path": path, "verifier": "user"}])


def test_a_held_out_question_is_known_however_its_accents_are_written(tmp_path: Path, model: Path) -> None:
    train = problems(tmp_path / "p.jsonl", "Ren\u00e9 has 3.", "x")
    test = problems(tmp_path / "q.jsonl", "RENE\u0301 has 3.")
    with pytest.raises(TaskError, match=r"shares 1 of its questions"):
        build(model, [{"path": train}], [{"path": test}])


def test_golds_that_earn_nothing_are_left_out_and_many_are_refused(tmp_path: Path, model: Path) -> None:
    rows = [{"problem": f"p{i}", "answer": "two\nlines" if i in (7, 9) else f"a {i}"} for i in range(20)]
    task = build(model, [{"path": str(make.jsonl(tmp_path / "p.jsonl", rows)), "verifier": "exact"}])
    assert len(task.train) == 18 and task.counts == {"p/unpaid": 2}
    assert f"unpaid 2 (first: '{tmp_path}/p.jsonl' line 8)" in task.notes[0]
    rows[12]["answer"] = "*"
    with pytest.raises(TaskError, match=r"line 8: verifier 'exact' gives 0\.0 for the answer 'two\\nlines' itself"):
        build(model, [{"path": str(make.jsonl(tmp_path / "q.jsonl", rows)), "verifier": "exact"}])


def test_a_reward_of_the_users_needs_no_gold(tmp_path: Path, model: Path) -> None:
    path = str(make.jsonl(tmp_path / "p.jsonl", [{"prompt": "Write a poem.", "tests": ["t"] * 3}]))
    (prompt,) = build(model, [{"path": path}], reward="package.module:function").train
    assert (prompt.answer, prompt.source, prompt.extra) == ("", "user", '{"tests": ["t", "t", "t"]}')


def test_other_contents_of_a_file_have_another_fingerprint(tmp_path: Path, model: Path) -> None:
    def mark(*questions: str, answer: str = "1") -> str:
        task = build(model, [{"path": problems(tmp_path / "p.jsonl", *questions, answer=answer)}])
        return data_fingerprint(task.train, task.eval)

    assert mark("a", "b") == mark("a", "b", "a")
    assert len({mark("a", "b"), mark("a", "c"), mark("b", "a"), mark("a", "b", answer="2"), mark("a")}) == 5


def test_procedures_beside_files(tmp_path: Path, model: Path) -> None:
    held_out = {"procedural": "chain_sum", "size": 12, "options": {"min_terms": 2, "max_terms": 3}}
    train = [{**held_out, "size": 30}, {"path": problems(tmp_path / "p.jsonl", "a")}]
    task = build(model, train, [held_out])
    assert [sum(p.data_source == n for p in task.train) for n in ("chain_sum", "p")] == [30, 1]
    assert len(task.eval) == 12 and not {p.text for p in task.train} & {p.text for p in task.eval}


def test_the_longest_prompt_is_known_without_reading(model: Path) -> None:
    section = TaskSection(name="sources", train=(SourceSection(path="no.csv"),), max_prompt_tokens=77)
    assert tasks.longest_prompt(section, model) == 77
    (model / "chat_template.jinja").unlink()
    with pytest.raises(TaskError, match="has no chat template"):
        tasks.longest_prompt(section.model_copy(update={"chat": True}), model)


def test_a_source_says_what_its_responses_must_hold(tmp_path: Path, model: Path) -> None:
    sources = [
        {"path": problems(tmp_path / "whole.jsonl", "q", answer="12")},
        {"procedural": "gcd", "size": 8},
        {"path": problems(tmp_path / "mixed.jsonl", "r", answer="1/2")},
    ]
    whole, made, mixed = build(model, sources).notes
    assert whole.endswith(r"; scored by integer: \boxed{} or a line `Answer: ...`; nothing counts outside of them")
    assert "; scored by rg_number: what the response marks last" in made and "its last number" in made
    assert "; scored by math: " in mixed
    (own,) = build(model, sources[:1], reward="tests.tasks.user_rewards:plain").notes
    assert own.endswith("; scored by task.reward=tests.tasks.user_rewards:plain")
    (own,) = build(model, sources[:1], environment="a.b:C").notes
    assert own.endswith("; scored by task.environment=a.b:C")


def test_every_verifier_says_what_it_looks_for() -> None:
    assert set(rewards.LOOKS_FOR) >= set(rewards.LAZY)
    assert {"chain_sum", "math", "integer", "gsm8k", "exact", "choice", "json_schema"} <= set(rewards.LOOKS_FOR)


def test_an_unknown_verifier_without_a_near_one_is_told_all_but_the_users(tmp_path: Path, model: Path) -> None:
    source = {"path": problems(tmp_path / "p.jsonl", "q"), "verifier": "zzz"}
    with pytest.raises(TaskError, match=r"task\.train\[0\]\.verifier='zzz' is no verifier; known are ") as caught:
        build(model, [source])
    assert "integer, " in str(caught.value) and "user" not in str(caught.value)
    with pytest.raises(TaskError, match="rg_word, user, zebra_grid"):
        build(model, [source], reward="tests.tasks.user_rewards:plain")


def test_each_source_is_named_in_the_log_before_it_is_read(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = problems(tmp_path / "p.jsonl", "q")
    with caplog.at_level("INFO"):
        build(model, [{"path": path}, {"procedural": "gcd", "size": 8}])
    said = [r.getMessage() for r in caplog.records]
    assert said[:2] == [f"task.train[0] p: reading {path!r}", "task.train[1] gcd: making 8 items of gcd"]


def games(path: Path, seeds: Sequence[int], **more: Any) -> str:
    rows = [{"prompt": "Play the game.", "id": f"{path.stem}-{i}", "seed": s, **more} for i, s in enumerate(seeds)]
    return str(make.jsonl(path, rows))


def test_rows_of_one_text_are_different_tasks_of_an_environment(tmp_path: Path, model: Path) -> None:
    train = {"path": games(tmp_path / "train.jsonl", [1, 2, 3, 3])}
    held_out = {"path": games(tmp_path / "eval.jsonl", [8])}
    task = build(model, [train], [held_out], environment="a.b:C")
    assert [json.loads(p.extra)["seed"] for p in task.train] == [1, 2, 3]
    assert len({p.prompt_id for p in task.train}) == 3 and task.counts == {"train/duplicate": 1}
    assert [p.prompt_id for p in task.train] == [p.prompt_id for p in build(model, [train], environment="a.b:C").train]
    # a subset does not depend on the order of the rows
    other = {"path": games(tmp_path / "other.jsonl", [3, 2, 1]), "name": "train", "size": 2}
    chosen = build(model, [train | {"size": 2}], environment="a.b:C").train
    assert {p.prompt_id for p in chosen} == {p.prompt_id for p in build(model, [other], environment="a.b:C").train}


def test_a_held_out_task_of_an_environment_is_refused_for_training(tmp_path: Path, model: Path) -> None:
    train = {"path": games(tmp_path / "train.jsonl", [1, 2, 3])}
    with pytest.raises(TaskError, match=r"shares 1 of its questions with task\.train\[0\]"):
        build(model, [train], [{"path": games(tmp_path / "eval.jsonl", [3])}], environment="a.b:C")
    # a text that stands for one task in both is that question, whatever else its row says
    once = {"path": problems(tmp_path / "p.jsonl", "q", "r")}
    again = {"path": str(make.jsonl(tmp_path / "e.jsonl", [{"problem": "q", "answer": "1", "level": 4}]))}
    with pytest.raises(TaskError, match=r"shares 1 of its questions"):
        build(model, [once], [again], environment="a.b:C")


def test_answers_make_tasks_of_an_environment_and_conflicts_of_a_verifier(tmp_path: Path, model: Path) -> None:
    rows = [{"problem": "q", "answer": a} for a in ("1", "2", "2")] + [{"problem": "r", "answer": "3"}]
    source = {"path": str(make.jsonl(tmp_path / "p.jsonl", rows))}
    assert [p.answer for p in build(model, [source], environment="a.b:C").train] == ["1", "2", "3"]
    assert [p.answer for p in build(model, [source]).train] == ["3"]
