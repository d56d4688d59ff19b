"""Every alarm, provoked by a real run; grouped, so that five runs do for sixteen alarms."""

import contextlib
import json
import os
import shutil
import signal
import time

import psutil
import pytest
from safetensors.torch import load_file, save_file

from asyncrl.sections.alarms import AlarmsSection
from tests.system.conftest import ROOT, char_model, start_run  # noqa: F401 - fixtures
from tests.system.test_alarms import alarms, tune

pytestmark = pytest.mark.timeout(1500)

HOT = {"f_2", "kl_rising", "ess_falling", "drift_rising", "lag_at_cap"}
SHORT = {"reward_length_collapse"}
SLOW = {"generators_starving", "truncation", "zero_variance", "dead_experts"}
FLEET = {"masked_tokens", "reward_errors", "dead_generator", "learner_starving"}
SKIPS = {"skipped_updates", "not_finite"}
QUIET = {"eval.every": 0, "learner.checkpoint_every": 0}
QUICKSTART = {
    "model.path": ROOT / "models" / "quickstart", "task.train_size": 8192, "task.max_terms": 5, "eval.every": 0,
    "sampling.max_new_tokens": 32, "generator.groups_in_flight": 32, "algorithm.groups_per_update": 16,
    "algorithm.group_size": 8, "algorithm.rdc.q": 0.08,
}  # fmt: skip


def came(run):
    """Names of the alarms that went on."""
    return {line["name"] for line in alarms(run) if line["on"]}


def stop(run):
    run.process.send_signal(signal.SIGTERM)
    run.wait(60)


def collapsed(folder):
    """Routers whose logits are all multiples of one number: the two highest multiples win, or the two lowest."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, weight in tensors.items():
        if name.endswith("mlp.gate.weight"):
            for expert in range(1, len(weight)):
                weight[expert] = weight[0] * (1 + expert)
    save_file(tensors, file, {"format": "pt"})


def test_between_them_the_runs_provoke_every_alarm():
    assert set(AlarmsSection().rules()) == HOT | SHORT | SLOW | FLEET | SKIPS


def test_a_learner_that_gets_hot_on_old_data_without_a_correction(start_run):  # noqa: F811
    """The first 20 updates of one lag, with which drift is compared, are those before the learning rate is tuned."""
    run = start_run(
        "hot",
        **QUICKSTART,
        **{
            "learner.lr": 3e-4, "learner.updates": 400, "learner.checkpoint_every": 0, "staleness.sync_every": 4,
            "staleness.max_lag": 8, "algorithm.rdc.mode": "off", "algorithm.correction.kind": "none",
        },
    )  # fmt: skip
    run.wait_for(lambda: len(run.updates()) >= 32, 600)
    assert came(run) == set()
    tune(run, "learner.lr=3e-3")
    run.wait_for(lambda: came(run) >= HOT, 900)
    stop(run)


def test_answers_that_get_short_and_wrong_within_a_resumed_run(start_run):  # noqa: F811
    run = start_run("short", **QUICKSTART, **{"learner.checkpoint_every": 4, "learner.updates": 200})
    run.wait_for(lambda: len(run.updates()) >= 10, 300)
    stop(run)
    assert came(run) == set()
    again = start_run("short", resume=True, **{"sampling.max_new_tokens": 3})
    again.wait_for(lambda: came(again) >= SHORT, 300)
    (line,) = alarms(again, "reward_length_collapse")
    first = next(r["update"] for r in again.updates() if r.get("run/epoch") == 1)
    assert first <= line["since"] <= first + 4, "the best reward is that of the updates before the run was resumed"
    stop(again)


def test_a_slow_learner_with_collapsed_routers_and_too_short_answers(start_run, char_model, tmp_path):  # noqa: F811
    model = tmp_path / "collapsed"
    shutil.copytree(char_model, model)
    collapsed(model)
    run = start_run(
        "slow", **QUIET,
        **{
            "model.path": model, "sampling.max_new_tokens": 3, "algorithm.groups_per_update": 16,
            "generator.groups_in_flight": 16, "learner.micro_batch_tokens": 8, "staleness.sync_every": 1,
            "staleness.max_lag": 0, "learner.updates": 400, "alarms.generators_starving.seconds": 3,
            "algorithm.rdc.q": 0.01,
        },
    )  # fmt: skip
    run.wait_for(lambda: came(run) >= SLOW, 400)
    stop(run)


def workers_of(generator):
    """Ids of its reward workers."""
    found = []
    for child in generator.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any("worker" in part for part in child.cmdline()):
                found.append(child.pid)
    return found


def test_a_fleet_with_a_straggler_a_broken_verifier_a_dead_and_a_slow_generator(start_run):  # noqa: F811
    run = start_run(
        "fleet", **QUIET,
        **{
            "generator.count": 2, "learner.updates": 5000, "staleness.sync_every": 1, "staleness.max_lag": 1,
            "run.max_generator_restarts": 0, "replay.heartbeat_timeout_s": 8, "alarms.learner_starving.seconds": 3,
            "alarms.masked_tokens.updates": 1,
        },
    )  # fmt: skip
    run.wait_for(lambda: len(run.updates()) >= 5 and run.role("g1"), 300)
    one, two = run.role("g0"), run.role("g1")

    def straggle():
        """g1 stands still for a few updates, with leases."""
        seen = len(run.updates())
        two.suspend()
        until = time.monotonic() + 4
        while len(run.updates()) < seen + 5 and time.monotonic() < until:
            time.sleep(0.05)
        two.resume()
        time.sleep(1)
        return "masked_tokens" in came(run)

    run.wait_for(straggle, 200)

    def break_verifiers():
        for pid in workers_of(two):  # those of g0 go on scoring, or there would be no update
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return "reward_errors" in came(run)

    run.wait_for(break_verifiers, 200)
    two.kill()
    run.wait_for(lambda: "dead_generator" in came(run), 200)

    def slow():
        one.suspend()
        time.sleep(0.5)
        one.resume()
        time.sleep(0.05)
        return "learner_starving" in came(run)

    run.wait_for(slow, 200)
    (dead,) = [a["text"] for a in alarms(run, "dead_generator")]
    assert dead.startswith("no heartbeat from g1; 1 generators are alive")
    stop(run)


def overflowing(folder):
    """The same policy in other units: an output layer of 1e-22 behind a norm of 1e22; its gradient overflows."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 1e-22
    tensors["model.norm.weight"] *= 1e22
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))


def test_weights_whose_gradient_overflows(start_run, char_model, tmp_path):  # noqa: F811
    model = tmp_path / "overflowing"
    shutil.copytree(char_model, model)
    overflowing(model)
    groups = {"algorithm.groups_per_update": 8, "algorithm.group_size": 8, "generator.groups_in_flight": 8}
    run = start_run("skips", **QUIET, **groups, **{"model.path": model, "learner.max_skipped_updates": 5})
    assert run.wait(400) == 1, run.text()
    assert came(run) >= SKIPS, run.text()
    assert "updates in a row were skipped" in run.text()


def test_a_pause_by_an_alarm_lasts_until_it_is_tuned_away(start_run):  # noqa: F811
    watched = {"alarms.truncation": "{above: 0, updates: 3, window: 3, actions: [pause]}"}
    run = start_run("paused", **QUIET, **watched, **{"sampling.max_new_tokens": 3, "learner.updates": 40})
    run.wait_for(lambda: "truncation" in came(run), 300)

    def standing():
        before = len(run.updates())
        time.sleep(4)
        return len(run.updates()) == before

    run.wait_for(standing, 300)
    paused = run.updates()[-1]
    assert paused["staleness/published"] <= paused["update"] < 39
    tune(run, "weights.paused=false")
    assert run.wait(300) == 0, run.text()
    assert len(run.updates()) == 40
