"""The best policy by a metric: which version it is, whatever comes late, is cut short, undone or killed."""

import json
import shutil
import threading
from dataclasses import replace
from itertools import zip_longest

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config import save_config, validate
from asyncrl.errors import ConfigError
from asyncrl.learner import best as best_module
from asyncrl.learner.best import Best
from asyncrl.learner.best_folders import NOTE, read_note
from asyncrl.learner.export import export_step
from asyncrl.learner.fleet import FleetRates
from asyncrl.learner.publish import host_copy
from asyncrl.learner.publishing import Due, Publishing
from asyncrl.learner.recorder import Recorder
from asyncrl.models.load import load_model
from asyncrl.replay.evals import Evaluations
from asyncrl.replay.tally import Tally
from asyncrl.types import Version
from asyncrl.wire import EvalAnswer, EvalResult
from tests.helpers.ranks import free_port, run_ranks
from tests.learner.best_worker import Told
from tests.replay.support import make_prompts

METRIC = "eval/greedy_accuracy"


@pytest.fixture
def start(tmp_path):
    folder = tmp_path / "start"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "none"}')
    (folder / "tokenizer.json").write_text("{}")
    # A run may begin from the best of another one: what that says of its weights is not true of these.
    (folder / NOTE).write_text('{"version": "0.7", "metrics": {}}')
    return folder


@pytest.fixture
def config(tmp_path, start):
    return settings(tmp_path, start)


def settings(tmp_path, start, metric=METRIC, **learner):
    return validate(
        {
            "run": {"dir": str(tmp_path), "name": "run"}, "model": {"path": str(start)},
            "learner": {"updates": 40, "keep_best": metric} | learner, "eval": {"every": 10},
        }
    )  # fmt: skip


def offer(best, update, epoch=0):
    """Publish a version whose weights say which one it is, and wait until it is on the disk."""
    best.offer(Version(epoch, update), {"w": torch.full((3,), float(100 * epoch + update))})
    if best._job is not None:
        assert best._job.done.wait(60)


def tell(best, update, value, epoch=0, complete=True):
    best.measured(Version(epoch, update), {METRIC: value, "eval/version": update}, complete)


def held(config):
    """The number in the weights of RUN/best, its note, and what else is kept."""
    run = config.run_dir
    if not (run / "best").is_dir():
        return None, None, waiting(config)
    number = int(load_file(run / "best" / "model.safetensors")["w"][0])
    return number, json.loads((run / "best" / NOTE).read_text()), waiting(config)


def waiting(config):
    return sorted(f.name for f in (config.run_dir / "best.pending").glob("*"))


def test_the_version_with_the_highest_value_is_kept_with_what_was_measured(config):
    best = Best(config, 0, 0, False)
    for update, value in ((0, 0.2), (10, 0.6), (20, 0.5), (30, 0.1)):
        offer(best, update)
        tell(best, update, value)
        best.settle(update)
    number, note, others = held(config)
    assert number == 10 and others == []
    assert (note["metric"], note["value"], note["version"], note["epoch"], note["update"]) == (
        METRIC,
        0.6,
        "0.10",
        0,
        10,
    )
    assert note["complete"] is True and note["when"].endswith("+00:00") and note["metrics"][METRIC] == 0.6
    assert best.scalars() == {"run/best": 10, "run/best_value": 0.6}
    assert sorted(f.name for f in (config.run_dir / "best").iterdir()) == [
        NOTE, "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert json.loads((config.run_dir / "best" / "config.json").read_text())["dtype"] == "float32"
    offer(best, 40)
    tell(best, 40, 0.3)
    (config.run_dir / "best.0.9.part").mkdir()
    best.finish()
    # Nothing is left to a thread that ends with the process.
    assert [f.name for f in config.run_dir.iterdir()] == ["best"]


def test_only_what_will_be_evaluated_is_written_and_the_last_version_always(config):
    best = Best(config, 0, 0, False)
    for update in (0, 4, 8, 12, 16, 20):
        offer(best, update)
    assert waiting(config) == ["0.0", "0.12", "0.20"]  # the first ones at or after 0, 10, 20
    best.follow(settings(config.run_dir.parent, config.model.path, updates=22))
    offer(best, 22)
    assert "0.22" in waiting(config)


def test_another_number_of_updates_between_evaluations_is_followed(config):
    best = Best(config, 0, 0, False)
    offer(best, 0)
    best.follow(config.model_copy(update={"eval": config.eval.model_copy(update={"every": 5})}))
    for update in (4, 6, 8, 11):
        offer(best, update)
    assert waiting(config) == ["0.0", "0.11", "0.6"]
    best.follow(config.model_copy(update={"eval": config.eval.model_copy(update={"every": 0})}))
    offer(best, 30)
    assert "0.30" not in waiting(config)


def test_a_version_that_was_not_published_is_followed_by_the_next_one(config):
    best = Best(config, 0, 0, False)
    offer(best, 0)
    offer(best, 10)
    best.withdraw(Version(0, 10))
    offer(best, 12)
    offer(best, 14)
    assert waiting(config) == ["0.0", "0.10", "0.12"]


def test_results_come_late_and_in_any_order(config):
    best = Best(config, 0, 0, False)
    for update in (0, 10, 20):
        offer(best, update)
    tell(best, 20, 0.3)
    best.settle(20)
    assert held(config)[0] == 20
    tell(best, 0, 0.4)
    best.settle(20)
    assert held(config)[0] == 0 and "0.10" in waiting(config)
    tell(best, 10, 0.1)
    best.settle(20)
    assert (held(config)[0], waiting(config)) == (0, [])


def test_of_equal_values_the_later_version_is_kept(config):
    best = Best(config, 0, 0, False)
    for update in (0, 10):
        offer(best, update)
        tell(best, update, 0.5)
        best.settle(update)
    assert held(config)[0] == 10


def test_an_evaluation_that_was_cut_short_counts_only_without_a_whole_one(config):
    best = Best(config, 0, 0, False)
    offer(best, 0)
    tell(best, 0, 0.9, complete=False)
    best.settle(0)
    assert held(config)[0] == 0
    offer(best, 10)
    tell(best, 10, 0.2)
    best.settle(10)
    assert held(config)[0] == 10
    offer(best, 20)
    tell(best, 20, 1.0, complete=False)
    best.settle(20)
    assert held(config)[0] == 10


class Evaluated:
    """Replay and the records of a recorder: one evaluation of each version that is told."""

    def __init__(self):
        self.evaluations = []
        self.counters = {}

    def tell(self, update, rewards, failed):
        tally = Tally()
        prompts = [replace(p, data_source="sum") for p in make_prompts(len(rewards) + failed, "e")]
        evals = Evaluations(prompts, tally, every=1, samples=0, max_attempts=1)
        evals.publish(Version(0, update))
        for x, reward in zip_longest(evals.lease("g0", Version(0, update), 99, 0.0), rewards):
            if reward is None:
                evals.fail("g0", x.lease_id, "the verifier failed")
            else:
                answer = EvalAnswer(x.prompt.prompt_id, 0, True, reward, 4, "stop")
                evals.put(EvalResult(x.eval_id, (0, update), [answer]))
        self.evaluations += evals.finished

    def status(self):
        return {"evaluations": self.evaluations, "measuring": [], "finished": True}

    def write(self, update, values):
        pass


def test_a_mean_over_the_answers_whose_scoring_did_not_fail_is_no_match_for_a_whole_one(config, caplog, monkeypatch):
    monkeypatch.setattr(FleetRates, "begin", lambda *_: None)
    best, told = Best(config, 0, 0, False), Evaluated()
    recorder = Recorder(told, told, None, set(), None)
    recorder.best = best
    for update, rewards, failed in ((0, [1.0, 0.0, 0.0], 0), (10, [1.0], 2)):
        offer(best, update)
        told.tell(update, rewards, failed)
        recorder.wait_for_evaluations(60)
        best.settle(update)
    assert held(config)[0] == 0
    assert "evaluation 0.10 was cut short; without an answer: 2 of 3 responses to sum" in caplog.text


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "no evaluation is over yet that learner.keep_best=eval/greedy_accuracy could compare"),
        ([{"eval/version": 0, "eval/sampled_accuracy": 0.5}], "none of its 1 evaluations gave .*sampled_accuracy"),
        ([{"eval/version": 0, METRIC: float("nan")}], "none of its 1 evaluations gave a finite learner.keep_best"),
        ([{"eval/version": 0, METRIC: 0.5}], "could not be kept; the learner's log says why"),
    ],
)
def test_an_export_of_a_best_policy_that_is_not_there_says_why(lines, why, config, tmp_path):
    config.run_dir.mkdir()
    save_config(config, config.run_dir / "config.yaml")
    (config.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"eval/v')
    with pytest.raises(ConfigError, match=f"has no step 'best': .*{why}.*; it has no other"):
        export_step(config.run_dir, "best", tmp_path / "out")


def test_a_metric_that_is_no_number_or_never_comes_is_said_with_those_that_do(config, caplog):
    best = Best(config, 0, 0, False)
    for update, metrics in ((0, {METRIC: float("nan")}), (10, {"eval/sampled_accuracy": 0.5, "eval/math/pass@4": 0.6})):
        offer(best, update)
        best.measured(Version(0, update), metrics, True)
        best.settle(update)
    assert "version 0.0 is no candidate for the best policy: its eval/greedy_accuracy is nan" in caplog.text
    assert "0.10 has no such metric, it has eval/math/pass@4, eval/sampled_accuracy" in caplog.text
    best.finish()
    assert held(config)[0] is None
    assert "no evaluation gave eval/greedy_accuracy; metrics: eval/math/pass@4, eval/sampled_accuracy" in caplog.text


def test_no_more_than_a_few_versions_wait_for_their_evaluation(config):
    best = Best(config, 0, 0, False)
    for update in (0, 10, 20, 30, 40):
        offer(best, update)
        best.settle(update)
    assert waiting(config) == ["0.20", "0.30", "0.40"]


def test_a_version_that_is_measured_now_waits_however_many_later_ones_there_are(config):
    """Evaluations that take longer than a few of eval.every: replay finishes the one that it began and skips others."""
    best = Best(config, 0, 0, False)
    for update in (0, 10, 20, 30):
        offer(best, update)
        best.measuring = frozenset({Version(0, 0), Version(0, update)})
        best.settle(update)
    assert waiting(config) == ["0.0", "0.10", "0.20", "0.30"]
    offer(best, 40)
    best.settle(40)
    assert waiting(config) == ["0.0", "0.20", "0.30", "0.40"]
    tell(best, 0, 0.5)
    best.measuring = frozenset({Version(0, 40)})
    best.settle(40)
    assert held(config)[0] == 0 and waiting(config) == ["0.20", "0.30", "0.40"]
    best.finish()
    assert waiting(config) == []


def test_a_result_after_a_resume_counts_for_the_version_that_was_kept(config):
    first = Best(config, 0, 0, False)
    for update in (0, 10, 20):
        offer(first, update)
    tell(first, 0, 0.3)
    first.settle(20)
    # Killed at update 23 with a checkpoint of 20: that version stands.
    second = Best(config, 1, 20, False)
    second.settle(20)
    assert second.scalars() == {"run/best": 0, "run/best_value": 0.3}
    tell(second, 10, 0.8)
    tell(second, 20, 0.7)
    second.settle(20)
    assert (held(config)[0], waiting(config)) == (10, [])
    offer(second, 20, epoch=1)  # replay may measure the version that a learner begins with
    assert waiting(config) == ["1.20"]


def test_versions_that_a_resumed_learner_undid_are_forgotten_and_the_best_before_them_is_there(config, caplog):
    first = Best(config, 0, 0, False)
    for update, value, newest in ((0, 0.3, -1), (10, 0.5, 10), (20, 0.4, 10), (30, 0.9, 10)):
        offer(first, update)
        tell(first, update, value)
        first.settle(newest)
    # 30 is the best, and 10 the best that no resume undoes.
    assert (held(config)[0], waiting(config)) == (30, ["0.10"])
    second = Best(config, 1, 10, False)
    assert "version 0.30 was undone" in caplog.text
    second.settle(10)
    assert (held(config)[0], waiting(config)) == (10, [])
    offer(second, 20, epoch=1)
    tell(second, 20, 0.6, epoch=1)
    second.settle(20)
    assert (held(config)[0], waiting(config)) == (120, [])


def test_a_learner_that_only_waits_for_the_last_evaluation_undoes_nothing(config):
    first = Best(config, 0, 0, False)
    for update in (30, 40):
        offer(first, update)
    tell(first, 30, 0.4)
    first.settle(30)
    # Killed behind its last update, when its checkpoints were removed already: it begins as at update 0.
    second = Best(config, 1, 0, True)
    tell(second, 40, 0.5)
    second.finish()
    assert (held(config)[0], waiting(config)) == (40, [])


@pytest.mark.parametrize("step", ["promoted", "displaced"])
def test_a_kill_between_two_renames_loses_nothing(step, config):
    first = Best(config, 0, 0, False)
    for update, value in ((0, 0.3), (10, 0.5)):
        offer(first, update)
        tell(first, update, value)
        if update == 0 or step == "promoted":
            first.settle(0)
    if step == "displaced":
        (config.run_dir / "best").rename(config.run_dir / "best.pending" / "0.0")
    (config.run_dir / "best.pending" / "0.20.part").mkdir()
    second = Best(config, 1, 10, False)
    second.settle(10)
    assert (held(config)[0], waiting(config)) == (10, [])


def test_a_run_that_begins_anew_sets_the_best_policy_of_before_aside(config):
    for _ in range(2):
        best = Best(config, 0, 0, False)
        offer(best, 0)
        offer(best, 10)
        tell(best, 0, 0.5)
        best.settle(0)
    Best(config, 0, 0, False)
    assert sorted(f.name for f in config.run_dir.glob("best*")) == ["best-1", "best-2"]


def test_another_metric_after_a_resume_ranks_what_was_measured_by_it(tmp_path, start, config):
    best = Best(config, 0, 0, False)
    for update, greedy, sampled in ((0, 0.2, 0.1), (10, 0.5, 0.3)):
        offer(best, update)
        best.measured(Version(0, update), {METRIC: greedy, "eval/sampled_accuracy": sampled}, True)
        best.settle(update)
    again = Best(settings(tmp_path, start, "eval/sampled_accuracy"), 1, 10, False)
    again.settle(10)
    assert again.scalars() == {"run/best": 10, "run/best_value": 0.3}
    # What nobody measured of it stays until there is a better one.
    other = Best(settings(tmp_path, start, "eval/other"), 2, 10, False)
    other.settle(10)
    assert other.scalars() == {} and held(config)[0] == 10


def test_a_disk_that_is_slow_does_not_hold_up_training_and_a_full_one_costs_a_line(config, caplog, monkeypatch):
    gate = threading.Event()
    write = best_module.FolderWriter

    class Slow(write):
        def finish(self):
            assert gate.wait(60)
            super().finish()

    monkeypatch.setattr(best_module, "FolderWriter", Slow)
    best = Best(config, 0, 0, False)
    best.offer(Version(0, 0), {"w": torch.zeros(3)})
    tell(best, 0, 0.5)  # sooner than the disk
    best.settle(0)
    assert held(config)[0] is None
    best.offer(Version(0, 10), {"w": torch.full((3,), 10.0)})
    assert "version 0.10 cannot become the best policy: version 0.0 is still being written" in caplog.text
    job = best._job
    gate.set()
    assert job.done.wait(60)
    best.settle(0)
    assert held(config)[0] == 0
    tell(best, 10, 0.9)
    assert "version 0.10 has eval/greedy_accuracy=0.9, but its weights were not kept" in caplog.text
    (config.run_dir / "best.pending").rmdir()
    (config.run_dir / "best.pending").write_text("in the way")
    offer(best, 20)
    best.settle(20)
    assert "version 0.20 cannot become the best policy: " in caplog.text
    best.offer(Version(0, 30), {"w": torch.tensor([float("inf")])})


def test_the_last_version_waits_no_longer_than_other_ranks_do(tmp_path, start, monkeypatch, caplog):
    gate = threading.Event()
    write = best_module.FolderWriter

    class Slow(write):
        def finish(self):
            gate.wait(5)
            super().finish()

    monkeypatch.setattr(best_module, "FolderWriter", Slow)
    monkeypatch.setattr(best_module, "WAIT_SHARE", 0.001)
    best = Best(settings(tmp_path, start, ranks=2, collective_timeout_s=10), 0, 0, False)
    best.offer(Version(0, 0), {"w": torch.zeros(3)})
    job = best._job
    best.offer(Version(0, 40), {"w": torch.zeros(3)})
    assert "version 0.40 cannot become the best policy: version 0.0 is still being written" in caplog.text
    gate.set()
    assert job.done.wait(60)


def test_a_policy_that_is_not_finite_is_no_candidate(config, caplog):
    best = Best(config, 0, 0, False)
    best.offer(Version(0, 0), {"w": torch.tensor([1.0, float("inf")])})
    assert best._job.done.wait(60)
    tell(best, 0, 0.5)
    best.settle(0)
    assert held(config)[0] is None and "w is not finite" in caplog.text


def test_what_is_kept_is_what_was_published_and_can_be_loaded_and_exported(model_dir, made, world, tmp_path):
    config = validate(
        {
            "run": {"dir": str(tmp_path), "name": "run"}, "model": {"path": model_dir},
            "learner": {"keep_best": METRIC}, "eval": {"every": 10},
        }
    )  # fmt: skip
    config.run_dir.mkdir()
    from asyncrl.config import save_config

    save_config(config, config.run_dir / "config.yaml")
    with pytest.raises(ConfigError, match="no evaluation is over yet"):
        export_step(config.run_dir, "best", tmp_path / "out")
    policy, _ = made
    publishing = Publishing(Told(), world, Due(4, 8), 60.0, lambda *_: None)
    publishing.keeper = best = Best(config, 0, 0, False)
    publishing.publish_if_due(policy, Version(0, 0), 0, 1)
    tell(best, 0, 0.5)
    best.finish()
    wanted = host_copy(policy, world)
    assert export_step(config.run_dir, "best", tmp_path / "out") > 0
    for folder in (config.run_dir / "best", tmp_path / "out"):
        stored = load_file(folder / "model.safetensors")
        assert stored.keys() == wanted.keys() and all(torch.equal(stored[n], wanted[n]) for n in wanted)
    assert read_note(tmp_path / "out") is None
    model = load_model(str(config.run_dir / "best"), "float32")
    assert torch.equal(model.state_dict()["lm_head.weight"], wanted["lm_head.weight"])
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"has no step '12'; it has best"):
        export_step(config.run_dir, "12", tmp_path / "out")


def test_two_ranks_keep_the_whole_policy(model_dir, tmp_path):
    run_dir = tmp_path / "run"
    ended = run_ranks("tests/learner/best_worker.py", 2, tmp_path, free_port(), run_dir, model_dir)
    assert ended.codes == [0, 0], ended.said[-4000:]
    stored, start = load_file(run_dir / "best" / "model.safetensors"), load_file(f"{model_dir}/model.safetensors")
    assert stored.keys() == start.keys()
    assert all(torch.equal(stored[name], start[name] + 1) for name in start)
    assert read_note(run_dir / "best")["version"] == "0.10"
