"""`asyncrl tune` in the middle of real runs: what is changed holds from the next update on, and nothing is lost."""

import json
import os
import signal
import threading
import time

import pytest

from asyncrl.metrics.sink import timeline
from asyncrl.watch.client import Operator, find
from asyncrl.watch.tune import request
from tests.system.test_run import assert_lag_bound

METRIC = {"learner.lr": "settings/lr", "algorithm.rdc.q": "settings/rdc_q", "staleness.max_lag": "settings/max_lag"}
SPREAD = {"staleness.sync_every": 4, "staleness.max_lag": 16, "eval.every": 0}
ANSWER_S = 120.0


class Tuner:
    """Operators of one run, and what its tune.jsonl says."""

    def __init__(self, run):
        self.run = run
        run.wait_for(lambda: len(run.updates()) >= 2, 300)

    def __call__(self, *changes, undo=0):
        with Operator(find(str(self.run.folder))) as operator:
            reply = request(operator, changes, undo, ANSWER_S)
        assert reply.ok, reply.text
        return reply

    def many(self, key, values, failed):
        """Changes of one key, one after the other."""
        try:
            with Operator(find(str(self.run.folder))) as operator:
                for value in values:
                    reply = request(operator, [f"{key}={value}"], 0, ANSWER_S)
                    assert reply.ok, reply.text
                    time.sleep(0.05)
        except BaseException as exc:
            failed.append(exc)

    def lines(self):
        return [json.loads(line) for line in (self.run.folder / "tune.jsonl").read_text().splitlines()]

    def values(self, seq, base):
        """Value of each METRIC after change `seq`."""
        out = dict(base)
        for line in self.lines():
            if "changes" in line and line["seq"] <= seq:
                out |= {key: new for key, (_, new) in line["changes"].items()}
        return {METRIC[key]: value for key, value in out.items() if key in METRIC}

    def applied(self, seq):
        """The first update of which the take had change `seq`, None before."""
        return next((x["applied_at"] for x in self.lines() if "applied_at" in x and x["seq"] >= seq), None)

    def in_force(self, update):
        return max((x["seq"] for x in self.lines() if x.get("applied_at", 10**9) <= update), default=0)


def test_fifty_changes_under_load_then_from_lag_16_to_on_policy_then_a_pause(start_run):
    run = start_run("tune", **SPREAD, **{"learner.updates": 1000})
    tune = Tuner(run)
    failed: list[BaseException] = []
    lr, q = [1e-4 + i * 1e-6 for i in range(25)], [0.1 + i / 100 for i in range(25)]
    pairs = ("learner.lr", lr), ("algorithm.rdc.q", q)
    threads = [threading.Thread(target=tune.many, args=(*pair, failed)) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * ANSWER_S)
    assert not failed, failed
    reply = tune("staleness.max_lag=0", "staleness.sync_every=1")
    assert reply.tuned.seq == 51
    run.wait_for(lambda: run.updates()[-1]["tune/changes"] == 51, 300)
    tune("weights.paused=true")
    run.wait_for(lambda: tune.applied(52) is not None, 300)
    # The last update before the pause; the next one needs its version, which does not come.
    last = tune.applied(52)
    with Operator(find(str(run.folder))) as operator:
        run.wait_for(lambda: operator.status(ANSWER_S)["update"] == last + 1, 300)
        time.sleep(2.0)
        state = operator.status(ANSWER_S)
        assert (state["update"], state["newest"][1]) == (last + 1, last)
    run.wait_for(lambda: len(run.updates()) == last + 1)
    assert tune(undo=1).tuned.values.get("weights.paused") is None
    run.wait_for(lambda: len(run.updates()) >= last + 4, 300)
    run.process.send_signal(signal.SIGTERM)
    run.wait(150)
    assert run.processes() == []
    updates = run.updates()
    assert [r["update"] for r in updates] == list(range(len(updates)))
    base = {"learner.lr": 3e-4, "algorithm.rdc.q": 0.2, "staleness.max_lag": 16}
    for r in updates:
        assert r["tune/changes"] == tune.in_force(r["update"]), r["update"]
        expected = tune.values(r["tune/changes"], base)
        assert {key: r[key] for key in expected} == expected, r["update"]
    assert [line["seq"] for line in tune.lines() if "changes" in line] == list(range(1, 54)), "none lost, none twice"
    for line in tune.lines():
        if line.get("seq") == 51 and "update" in line:
            # The first update from which on a take could be had on policy.
            assert tune.in_force(line["update"] + 2) >= 51
    on_policy = [r for r in updates if r["settings/max_lag"] == 0]
    assert on_policy and max(r.get("staleness/lag_max", 0) for r in on_policy) == 0
    assert max(r["staleness/lag_max"] for r in updates) > 0
    # The values of the config of before, named by the resume, win over what was tuned; nothing else is lost.
    again = start_run("tune", resume=True, **{"staleness.max_lag": 16, "staleness.sync_every": 4})
    again.wait_for(lambda: len(again.updates()) > len(updates), 300)
    again.process.send_signal(signal.SIGTERM)
    again.wait(150)
    said, record = again.output.read_text(), again.updates()[len(updates)]
    assert "no longer tuned: staleness.max_lag: 0 -> 16" in said and "tuned, still in force: learner.lr=" in said
    assert (record["settings/max_lag"], record["settings/sync_every"], record["tune/changes"]) == (16, 4, 53)
    assert record["settings/lr"] == updates[-1]["settings/lr"] != 3e-4


@pytest.mark.long
def test_changes_survive_kills_of_replay_and_of_the_learner(start_run):
    """Two ranks, two updates per take; replay and then the learner are killed between changes."""
    changes = {"learner.updates": 60, "learner.ranks": 2, "staleness.updates_per_take": 2}
    changes |= {"learner.checkpoint_every": 4, "replay.heartbeat_timeout_s": 5}
    run = start_run("kills", **SPREAD, **changes)
    tune = Tuner(run)
    for i in range(30):
        tune(f"learner.lr={1e-4 + i * 1e-6}")
        if i == 10:
            os.kill(run.role("replay").pid, signal.SIGKILL)
        if i == 20:
            run.wait_for(lambda: len(run.updates()) >= 10)
            os.kill(run.role("learn").pid, signal.SIGKILL)
    tune("staleness.max_lag=2", "staleness.sync_every=2")
    assert run.wait(300) == 0, run.text()
    updates = run.updates()
    assert [line["seq"] for line in tune.lines() if "changes" in line] == list(range(1, 32)), "none lost, none twice"
    base = {"learner.lr": 3e-4, "algorithm.rdc.q": 0.2, "staleness.max_lag": 16}
    for r in updates:
        expected = tune.values(r["tune/changes"], base)
        assert {key: r[key] for key in expected} == expected, r["update"]
    seqs = [r["tune/changes"] for r in updates]
    assert seqs == sorted(seqs), "a restarted learner goes on with what was in force"
    assert {r["run/epoch"] for r in updates} == {0, 1}
    last = [r for r in timeline(run.records()) if "policy/reward" in r]
    assert [r["update"] for r in last] == list(range(60)) and last[-1]["tune/changes"] == 31
    assert_lag_bound(run, 16)
