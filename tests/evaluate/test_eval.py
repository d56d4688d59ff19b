"""`asyncrl eval` as a user runs it: real processes, the embedded engine, answers on the disk."""

import json
import shutil
import signal
import time
from collections import Counter
from math import comb

import pytest

from asyncrl.config import save_config, validate
from asyncrl.tasks import build
from tests.evaluate.conftest import SMALL

LONG = ("eval.samples=100", "generator.groups_in_flight=1", "algorithm.group_size=2")
"""808 answers, two at a time: it lasts."""
FAST = ("eval.samples=100", "generator.groups_in_flight=64", "algorithm.group_size=4")


def keys(lines):
    return Counter((r["prompt_id"], r["sample"], r["greedy"]) for r in lines)


def by_hand(lines, k):
    """avg@k, pass@2, pass@k, maj@k and greedy of 0/1 rewards, written out anew."""
    prompts = {r["prompt_id"]: [] for r in lines}
    for r in sorted(lines, key=lambda r: r["sample"]):
        if not r["greedy"]:
            prompts[r["prompt_id"]].append(r)
    rights = [sum(r["reward"] for r in rs) for rs in prompts.values()]
    voted = []
    for rs in prompts.values():
        texts = [r["extracted"] for r in rs if r["extracted"]]
        winner = max(dict.fromkeys(texts), key=texts.count) if texts else None
        voted.append(next((r["reward"] for r in rs if r["extracted"] == winner and winner), 0.0))
    greedy = [r["reward"] for r in lines if r["greedy"]]
    return {
        f"avg_at_{k}": sum(rights) / k / len(prompts),
        **{f"pass_at_{j}": sum(1 - comb(int(k - c), j) / comb(k, j) for c in rights) / len(prompts) for j in (1, 2, k)},
        f"maj_at_{k}": sum(voted) / len(prompts),
        "greedy": sum(greedy) / len(greedy),
        "truncated": sum(r["finish_reason"] == "length" for r in lines if not r["greedy"]) / (k * len(prompts)),
        "length": sum(r["tokens"] for r in lines if not r["greedy"]) / (k * len(prompts)),
    }


def test_every_answer_once_and_a_table_of_just_these(start, model, config):
    first = start(model, config)
    assert first.wait() == 0, first.text
    lines = first.lines()
    prompts = {r["prompt_id"] for r in lines}
    assert len(prompts) == 8
    asked = [(p, s, False) for p in prompts for s in range(4)] + [(p, 0, True) for p in prompts]
    assert keys(lines) == Counter(asked)
    for r in lines:
        assert r["set"] == "chain_sum" and r["prompt"].endswith("=") and r["reward"] in (0.0, 1.0)
        assert (r["reward"] == 1.0) == (r["extracted"] == r["gold"]) and 0 < r["tokens"] <= 10
    table = json.loads((first.out / "table.json").read_text())
    (numbers,) = table["sets"].values()
    for name, value in by_hand(lines, 4).items():
        assert numbers[name] == pytest.approx(value), name
    assert numbers["intervals"]["avg_at_4"]["low"] < numbers["avg_at_4"] < numbers["intervals"]["avg_at_4"]["high"]
    assert (numbers["missing"], numbers["failed"], numbers["count"]) == (0, 0, 40)
    shown = f"{numbers['avg_at_4']:.3f} ["
    assert shown in first.text and shown in (first.out / "table.md").read_text()
    # Once more: nothing is left to ask, and nothing is asked.
    before = (first.out / "answers.jsonl").read_bytes()
    again = start(model, config)
    assert again.wait() == 0 and "40 of 40 answers are there already" in again.text
    assert (first.out / "answers.jsonl").read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_evaluation_that_was_stopped_goes_on_where_it_was(start, model, config, number):
    first = start(model, config, *LONG)
    while not len(first.lines()) > 20:
        assert first.process.poll() is None, first.wait() or first.text
        time.sleep(0.02)
    first.process.send_signal(number)
    status = first.wait()
    had = first.lines()
    assert 20 < len(had) < 808, "it was over before it was stopped"
    if number == signal.SIGINT:
        assert status == 130 and f"{len(had)} of 808 answers are in" in first.text
        assert "the same command goes on" in first.text
    # What a kill in the middle of a line leaves.
    with (first.out / "answers.jsonl").open("a") as file:
        file.write('{"prompt_id": "chain_sum-')
    second = start(model, config, *FAST)
    assert second.wait() == 0, second.text
    assert f"{len(had)} of 808 answers are there already" in second.text
    lines = second.lines()
    assert lines[: len(had)] == had
    assert len(lines) == 808 and set(keys(lines).values()) == {1}
    table = json.loads((first.out / "table.json").read_text())["sets"]["chain_sum"]
    assert table["avg_at_100"] == pytest.approx(by_hand(lines, 100)["avg_at_100"]) and table["missing"] == 0


def test_answers_of_another_evaluation_are_never_mixed_in(start, model, config):
    assert start(model, config, "--limit", 2).wait() == 0
    refused = start(model, config, "--limit", 2, "sampling.temperature=0.7")
    assert refused.wait() == 2 and "sampling.temperature: 1.0 there, 0.7 now" in refused.text
    assert "give another folder as --out" in refused.text and len(refused.lines()) == 10


def test_the_policy_of_a_run_with_its_own_config(start, model, tmp_path):
    run = tmp_path / "runs" / "r"
    run.mkdir(parents=True)
    save_config(validate({"model": {"path": str(model)}, **SMALL}), run / "config.yaml")
    shutil.copytree(model, run / "model")
    done = start(run, "eval.samples=1", "--limit", "3", out=run / "eval" / "final")
    assert done.wait() == 0, done.text
    assert f"Evaluation of {run} at final" in (done.out / "table.md").read_text() and len(done.lines()) == 6


def test_a_verifier_that_fails_is_listed_and_counts_nowhere(start, model, config, tmp_path, monkeypatch):
    (tmp_path / "half_broken.py").write_text(
        "def reward(text, answer):\n"
        "    if int(answer) % 2:\n"
        "        raise RuntimeError('no odd ones')\n"
        "    return {'reward': 2.0, 'length': float(len(text))}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = start(model, config, "task.reward=half_broken:reward")
    assert done.wait() == 1, done.text
    lines = done.lines()
    odd = [r for r in lines if int(r["gold"]) % 2]
    assert 0 < len(odd) < 40 and all(r["reward"] is None and "no odd ones" in r["error"] for r in odd)
    numbers = json.loads((done.out / "table.json").read_text())["sets"]["chain_sum"]
    assert (numbers["failed"], numbers["count"], numbers["greedy"]) == (len(odd), 40 - len(odd), 2.0)
    sampled = [r["parts"]["length"] for r in lines if r["reward"] is not None and not r["greedy"]]
    assert numbers["part/length"] == pytest.approx(sum(sampled) / len(sampled))
    assert f"{len(odd)} answers have no reward and count nowhere" in done.text


HANGS = """
import os, time
class Env:
    def __init__(self, prompt, answer, extra):
        self.prompt, self.answer = prompt, answer
    def step(self, text):
        if self.prompt in open(os.environ["HANGING"]).read().split("|"):
            time.sleep(3600)
        return {"observation": None, "done": True, "reward": 1.0}
"""


def test_an_episode_that_hangs_costs_itself_alone_and_is_asked_again(start, model, config, tmp_path, monkeypatch):
    (tmp_path / "hangs_here.py").write_text(HANGS)
    prompt = build(validate({"model": {"path": str(model)}, **SMALL}).task, model).eval[3]
    hanging = tmp_path / "hanging"
    hanging.write_text(prompt.text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HANGING", str(hanging))
    command = (
        model, config, "task.environment=hangs_here:Env", "eval.samples=2", "eval.greedy=false",
        "generator.reward_timeout_s=2", "replay.max_attempts=2",
    )  # fmt: skip
    first = start(*command)
    assert first.wait() == 1, first.text
    lines = first.lines()
    assert len(lines) == 16 and set(keys(lines).values()) == {1}
    failed = [r for r in lines if r["reward"] is None]
    # The 14 others shared its process, which was ended.
    assert [(r["prompt_id"], r["attempts"]) for r in failed] == [(prompt.prompt_id, 2)] * 2, failed
    assert any(r["attempts"] == 2 for r in lines if r["reward"] is not None)
    assert "2 x chain_sum: timeout: step() gave no answer within 2 s" in first.text
    numbers = json.loads((first.out / "table.json").read_text())["sets"]["chain_sum"]
    assert (numbers["failed"], numbers["count"], numbers["missing"]) == (2, 14, 0) and "no_answer" not in numbers
    # The same command, once it hangs no more, asks for these alone.
    hanging.write_text("")
    second = start(*command)
    assert second.wait() == 0, second.text
    assert "14 of 16 answers are there already" in second.text and "2 without a reward are asked again" in second.text
    assert len(second.lines()) == 16 and [r for r in second.lines() if r["reward"] is None] == []
    assert [r for r in second.lines() if r["prompt_id"] != prompt.prompt_id] == [
        r for r in lines if r["prompt_id"] != prompt.prompt_id
    ]


def test_unusable_data_is_said_as_every_other_fault_of_a_config(start, model, config, tmp_path):
    (tmp_path / "set.jsonl").write_text('{"question": "1+1="}\n')
    task = f"task.eval=[{{path: {tmp_path / 'set.jsonl'}, name: four}}]"
    done = start(model, config, "task.name=sources", task)
    assert done.wait() == 2 and done.text.startswith("config error: ") and "set.jsonl" in done.text, done.text
