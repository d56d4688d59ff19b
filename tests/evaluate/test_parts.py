"""The parts of `asyncrl eval`: what is evaluated, what is asked, what lies on the disk, what is shown."""

import io
import json
import shutil

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from asyncrl.config import save_config, validate
from asyncrl.errors import ConfigError, TaskError
from asyncrl.evaluate import table
from asyncrl.evaluate.answers import Answers, lock_of, read
from asyncrl.evaluate.questions import Chosen, Key, identity, questions, without_training
from asyncrl.evaluate.run import run
from asyncrl.evaluate.subject import Subject, fingerprint, policy, subject
from asyncrl.evaluate.tied import served
from asyncrl.models.folder import weights_of
from asyncrl.replay.evals import Evaluations
from asyncrl.replay.tally import Tally
from asyncrl.tasks import build
from asyncrl.tasks.held_out import Asked, asked_by_set
from asyncrl.types import Version
from tests.evaluate.conftest import SMALL
from tests.helpers.tiny_models import qwen3_moe
from tests.learner.test_export import Run


def settings(folder="m", /, **sections):
    tree = {"model": {"path": str(folder)}, **SMALL}
    return validate(tree | {k: tree.get(k, {}) | v for k, v in sections.items()})


# --- what is evaluated ----------------------------------------------------------------------------


def test_a_model_folder_needs_a_config_and_is_the_model(model, config):
    what = subject(model, [str(config), "eval.samples=2"], None, None)
    assert (what.config.model.path, what.config.eval.samples) == (str(model), 2)
    assert str(what.out) == "eval/model" and what.run_dir is None
    with pytest.raises(ConfigError, match="says nothing of tasks; give a config as well"):
        subject(model, ["eval.samples=2"], None, None)
    with pytest.raises(ConfigError, match="--step=last is of a run"):
        subject(model, [str(config)], None, "last")
    # Whatever the config says: what is named is what is evaluated.
    assert subject(model, [str(config), "model.path=other"], None, None).config.model.path == str(model)


def test_what_is_neither_a_model_nor_a_run_is_refused(tmp_path, config):
    for target in (tmp_path, tmp_path / "nothing", config):
        with pytest.raises(ConfigError, match=r"is neither a model folder .* nor a run folder"):
            subject(target, [str(config)], None, None)


def test_a_server_that_runs_already_samples_weights_of_its_own(model, config):
    served_by = ["generator.engine=sglang", "generator.sglang.urls=[http://127.0.0.1:1]", "weights.carrier=disk"]
    with pytest.raises(ConfigError, match=r"generator\.sglang\.urls names running servers"):
        subject(model, [str(config), *served_by], None, None)


def test_the_steps_of_a_run(tmp_path, world):
    made = Run(tmp_path, "split", world)
    run_dir = made.dir
    newest = subject(run_dir, [], None, None)
    assert newest.step == "u8" and newest.out == run_dir / "eval" / "u8"
    assert subject(run_dir, [], None, "last").step == "u8" and subject(run_dir, [], None, "4").step == "u4"
    with pytest.raises(ConfigError, match=r"has no step 'best': learner\.keep_best=null kept none; it has 4, 8, last"):
        subject(run_dir, [], None, "best")
    with policy(newest) as folder:
        assert folder.parent == newest.out and weights_of(folder)
        last = fingerprint(folder)
    assert not folder.exists()
    with policy(subject(run_dir, [], None, "4")) as folder:
        assert fingerprint(folder) != last
    with policy(newest) as folder:
        assert fingerprint(folder) == last
    for step in ("5", "final", "x"):
        with pytest.raises(ConfigError, match=f"has no step '{step}'; it has 4, 8, last; name one with --step"):
            subject(run_dir, [], None, step)
    for name in ("model", "best"):
        shutil.copytree(made.start, run_dir / name)
    for step, name in ((None, "model"), ("final", "model")):
        what = subject(run_dir, ["eval.samples=3"], None, step)
        assert what.config.model.path == str(run_dir / name) and what.config.eval.samples == 3
        with policy(what) as folder:
            assert folder == run_dir / name
        assert folder.is_dir()
    best = subject(run_dir, [], None, "best")
    with policy(best) as folder:
        assert str(folder) == best.config.model.path and folder.parent == run_dir / "eval" / "best"
        before = fingerprint(folder)
        # A better policy takes its place while it is evaluated.
        (run_dir / "best").rename(run_dir / "gone")
        shutil.rmtree(run_dir / "gone")
        assert fingerprint(folder) == before == fingerprint(made.start)
    assert not folder.exists()


def test_a_run_without_a_policy_says_so(tmp_path):
    save_config(settings(), tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"has no checkpoint .* and is not over yet"):
        subject(tmp_path, [], None, None)


# --- what is asked --------------------------------------------------------------------------------


def test_questions_by_set_and_by_option(model):
    config = settings()
    held_out = build(config.task, model).eval
    asked = questions(config, held_out, Chosen())
    assert asked.asked == {"chain_sum": Asked(4, True)} and len(asked.keys()) == 8 * 5
    fewer = questions(config, held_out, Chosen(samples=2, greedy=False, limit=3))
    first = held_out[0].prompt_id
    asked_first = [pair[0] for pair in fewer.keys()[:2]]
    assert asked_first == [Key(first, 0, False), Key(first, 1, False)]
    assert len(fewer.keys()) == 6
    with pytest.raises(ConfigError, match=r"--set=aime: there is no such set in task\.eval; there is chain_sum"):
        questions(config, held_out, Chosen(sets=("aime",)))
    with pytest.raises(ConfigError, match="nothing is asked of the set chain_sum"):
        questions(config, held_out, Chosen(samples=0, greedy=False))
    with pytest.raises(ConfigError, match="list at least one set"):
        questions(config, [], Chosen())


def sources(folder, model):
    """Two held-out sets and training data, as files."""
    for name, first in (("train", 1), ("four", 2), ("two", 3)):
        rows = [{"question": f"{first}+{i}=", "answer": str(first + i)} for i in range(4)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = {name: {"path": str(folder / f"{name}.jsonl"), "verifier": "chain_sum"} for name in ("train", "four", "two")}
    task = {
        "name": "sources", "train": [path["train"]],
        "eval": [path["four"] | {"samples": 3}, path["two"] | {"name": "pairs", "samples": 0}],
    }  # fmt: skip
    return validate({"model": {"path": str(model)}, "task": task, "eval": {"samples": 2}})


def test_several_sets_of_files_are_asked_alike_here_and_by_replay(model, tmp_path):
    config = sources(tmp_path, model)
    held_out = build(config.task, model).eval
    asked = questions(config, held_out, Chosen())
    assert asked.asked == {"four": Asked(3, True), "pairs": Asked(0, True)}
    assert [len(prompts) for prompts in asked.prompts.values()] == [4, 4] and len(asked.keys()) == 4 * 4 + 4
    assert list(questions(config, held_out, Chosen(sets=("pairs",))).prompts) == ["pairs"]
    # As asyncrl.replay.server makes them.
    evals = Evaluations(held_out, Tally(), every=20, samples=2, sets=asked_by_set(config.task, config.eval))
    evals.publish(Version(0, 0))
    leases = evals.lease("g0", Version(0, 0), 100, 0.0)
    pairs = asked.keys()
    assert {(x.prompt.prompt_id, x.sample, x.greedy) for x in leases} == {tuple(key) for key, _ in pairs}
    # Without the training data there is nothing to compare with, and the same prompts.
    (tmp_path / "train.jsonl").unlink()
    assert [p.prompt_id for p in build(without_training(config).task, model).eval] == [p.prompt_id for p in held_out]
    with pytest.raises((ConfigError, TaskError), match="--no-overlap-check leaves it out"):
        run(Subject(config, tmp_path / "out"), Chosen())


def test_what_makes_two_evaluations_the_same(model):
    config = settings(model)
    held_out = build(config.task, model).eval
    same = identity(config, "m", questions(config, held_out, Chosen()))
    # Not what it was made from, nor how fast it goes.
    faster = settings(model, generator={"groups_in_flight": 64}, task={"min_terms": 3})
    assert identity(faster, "m", questions(faster, held_out, Chosen())) == same
    for changes in (
        {"sampling": {"temperature": 0.5}}, {"sampling": {"max_new_tokens": 9}}, {"run": {"seed": 1}},
        {"eval": {"samples": 3}}, {"eval": {"greedy": False}},
        {"model": {"router_dtype": "float32", "dtype": "bfloat16"}}, {"task": {"reward": "a.b:c"}},
    ):  # fmt: skip
        other = settings(model, **changes)
        assert identity(other, "m", questions(other, held_out, Chosen())) != same, changes
    assert identity(config, "other", questions(config, held_out, Chosen())) != same
    assert identity(config, "m", questions(config, held_out, Chosen(limit=7))) != same
    assert identity(config, "m", questions(config, held_out[::-1], Chosen(limit=7))) != identity(
        config, "m", questions(config, held_out, Chosen(limit=7))
    )


def test_a_changed_weight_is_another_model(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    assert fingerprint(copy) == fingerprint(model)
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"][3] += 0.5
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(copy) != fingerprint(model)


# --- on the disk ----------------------------------------------------------------------------------


def record(prompt="p", sample=0, reward=1.0, greedy=False, **more):
    line = {
        "prompt_id": prompt, "set": "math", "sample": sample, "greedy": greedy, "prompt": "q", "response": "a",
        "tokens": 3, "extracted": "6", "gold": "6", "reward": reward, "parts": {}, "finish_reason": "stop",
        "seconds": 0.1,
    }  # fmt: skip
    return line | more


def test_a_torn_last_line_is_asked_again_and_a_broken_one_is_named(tmp_path):
    with Answers(tmp_path, {"the model": "m"}, {}) as answers:
        answers.add(record("a"))
        answers.add(record("b"))
    whole = (tmp_path / "answers.jsonl").read_text()
    (tmp_path / "answers.jsonl").write_text(whole[:-30])
    with Answers(tmp_path, {"the model": "m"}, {}) as answers:
        assert answers.done == {Key("a", 0, False)}
        answers.add(record("b"))
    assert (tmp_path / "answers.jsonl").read_text() == whole
    (tmp_path / "answers.jsonl").write_text("what?\n" + whole)
    with pytest.raises(ConfigError, match=r"answers\.jsonl:1 is no answer"):
        Answers(tmp_path, {"the model": "m"}, {})
    (tmp_path / "answers.jsonl").write_bytes(whole.encode() + b"\xff\n")
    with pytest.raises(ConfigError, match=r"answers\.jsonl:3 is no answer"):
        Answers(tmp_path, {"the model": "m"}, {})
    # Of two lines of one response the last counts.
    (tmp_path / "answers.jsonl").write_text(whole + json.dumps(record("a", reward=0.0)) + "\n")
    assert [r["reward"] for r in read(tmp_path / "answers.jsonl")] == [0.0, 1.0]


def test_an_answer_without_a_reward_is_asked_again_and_the_last_line_counts(tmp_path):
    with Answers(tmp_path, {"the model": "m"}, {}) as answers:
        answers.add(record("a", reward=None, error="timeout"))
        answers.add(record("b"))
        assert answers.done == {Key("b", 0, False)} and answers.failed == {Key("a", 0, False)}
    with Answers(tmp_path, {"the model": "m"}, {}) as answers:
        assert answers.done == {Key("b", 0, False)}
        answers.add(record("a", reward=None, error="crash"))
        answers.add(record("a", reward=0.5))
        assert len(answers.done) == 2 and not answers.failed
        assert [(r["prompt_id"], r["reward"], r["attempts"]) for r in answers.records] == [("a", 0.5, 3), ("b", 1.0, 1)]
        file = tmp_path / "answers.jsonl"
        assert len(file.read_text().splitlines()) == 4 and read(file) == answers.records
        answers.compact()
        assert [json.loads(line) for line in file.read_text().splitlines()] == answers.records
        answers.add(record("c"))
    assert [r["prompt_id"] for r in read(file)] == ["a", "b", "c"]


def test_nothing_in_the_folder_of_another_process_is_removed(tmp_path, world):
    what = subject(Run(tmp_path, "split", world).dir, [], None, "4")
    exported = what.out / "policy.part"
    exported.mkdir(parents=True)
    (exported / "config.json").write_text("{}")
    with lock_of(what.out), pytest.raises(ConfigError, match="another process writes answers"):
        run(what, Chosen())
    assert (exported / "config.json").is_file()


def test_a_folder_has_one_writer_and_one_evaluation(tmp_path):
    with Answers(tmp_path, {"the model": "m", "run.seed": 0}, {}) as answers:
        answers.add(record())
        with pytest.raises(ConfigError, match="another process writes answers"):
            Answers(tmp_path, {"the model": "m", "run.seed": 0}, {})
    with pytest.raises(ConfigError, match=r"another evaluation \(run\.seed: 0 there, 1 now\)"):
        Answers(tmp_path, {"the model": "m", "run.seed": 1}, {})
    (tmp_path / "eval.json").unlink()
    with pytest.raises(ConfigError, match=r"has answers\.jsonl without eval\.json"):
        Answers(tmp_path, {"the model": "m", "run.seed": 0}, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        Answers(tmp_path / "file", {}, {})


# --- what is shown --------------------------------------------------------------------------------


def shown(found, width):
    out = io.StringIO()
    for each in table.drawn(found, "Evaluation of m", width):
        Console(file=out, width=width, no_color=True).print(each)
    return out.getvalue()


def test_the_table_by_hand():
    records = [record("a", s, r, extracted=x) for s, (r, x) in enumerate([(1.0, "6"), (0.0, "7")])]
    records += [record("b", s, r, extracted=x) for s, (r, x) in enumerate([(0.0, ""), (0.0, "1")])]
    records += [record("a", greedy=True), record("b", greedy=True, reward=None, error="timeout: no\nanswer")]
    records += [record("z", set="zebra", finish_reason="length", parts={"cells": 0.25})]
    found = table.numbers(records, {"math": Asked(2, True), "zebra": Asked(1, False)}, {"math": 3, "zebra": 1})
    math = found["sets"]["math"]
    assert (math["avg_at_2"], math["pass_at_2"], math["maj_at_2"], math["greedy"]) == (0.25, 0.5, 0.5, 1.0)
    assert (math["missing"], math["failed"], math["count"], math["no_answer"]) == (3, 1, 5.0, 0.25)
    assert found["failures"] == [
        {"prompt_id": "b", "set": "math", "sample": 0, "greedy": True, "error": "timeout: no\nanswer"}
    ]
    text = table.markdown(found, "Evaluation of m")
    assert "| math | 2 | 5 | 2 | 0.250 [" in text and "- 1 x math: timeout: no answer (b)" in text
    assert "- zebra: pass@1 1.000 [0.207, 1.000], cells 0.250" in text
    wide = shown(found, 80)
    assert max(map(len, wide.splitlines())) <= 80 and wide.count("avg@k") == 1 and "zebra" in wide
    narrow = shown(found, 40)  # a table for each set
    assert narrow.count("avg@k") == 2 and max(map(len, narrow.splitlines())) <= 40
    json.dumps(found, allow_nan=False)


def test_why_answers_have_no_reward_is_said_by_reason():
    failures = [{"set": "math", "prompt_id": f"p{i}", "error": f"timeout: {i} s\nof 10"} for i in range(500)]
    failures += [{"set": "math", "prompt_id": f"q{i}", "error": f"error: {chr(97 + i)}"} for i in range(12)]
    lines = table.reasons(failures)
    assert len(lines) == table.REASONS and lines[0] == "500 x math: timeout: 0 s of 10 (p0)"
    assert lines[1] == "1 x math: error: a (q0)" and lines[-1] == "4 x 4 other reasons"
    assert table.reasons([]) == [] and len(table.reasons(failures[-10:])) == 10


def test_no_set_or_a_model_that_is_too_short_is_said_before_anything_starts(model, tmp_path):
    config = settings(model, sampling={"max_new_tokens": 10_000})
    with pytest.raises(ConfigError, match=r"sampling\.max_new_tokens=10000 and the longest held-out prompt of \d+"):
        run(Subject(config, tmp_path / "out"), Chosen())
    task = {"name": "sources", "train": [{"path": "no.csv"}]}
    none = validate({"model": {"path": str(model)}, "task": task, "eval": {"every": 0}})
    with pytest.raises(ConfigError, match=r"task\.eval=\[\]: there is nothing to evaluate"):
        run(Subject(none, tmp_path / "out"), Chosen())
    assert not (tmp_path / "out").exists()


def test_a_tied_model_is_served_with_its_output_matrix(model, tmp_path):
    """The quickstart's model is tied: a server that does not tie it would sample from zeros."""
    with served(model, tmp_path) as folder:
        stored = weights_of(folder)
        assert set(stored) - set(weights_of(model)) == {"lm_head.weight"}
        head = load_file(folder / stored["lm_head.weight"].file)["lm_head.weight"]
        assert head.equal(load_file(model / "model.safetensors")["model.embed_tokens.weight"])
        assert (folder / "tokenizer.json").is_file()
    assert not folder.exists() and weights_of(model)
    untied = tmp_path / "untied"
    qwen3_moe(hidden=16).save_pretrained(untied)
    with served(untied, tmp_path) as folder:
        assert folder == untied
