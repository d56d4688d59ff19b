"""When a run ends because nothing can progress, and when it only warns. Limit 100 s unless a test says otherwise."""

import math
from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct

from asyncrl.replay.peers import Peers
from asyncrl.replay.watchdog import Sight, Watchdog
from asyncrl.wire import SCHEMA, Hello

WORKING = Sight(
    published=True, last_seen=0.0, num_alive=2, num_leased=8, oldest_lease=0.0, num_expired=0, tokens=0,
    waiting="3 of 4 groups for update 7, 8 leased",
)  # fmt: skip


class Run:
    """A watchdog that is asked every second, as replay does; the learner repeats its request meanwhile."""

    def __init__(self, sight: Sight, learner: bool = True) -> None:
        self.watchdog, self.sight, self.now, self.learner = Watchdog(100.0, 0.0), sight, 0.0, learner
        self.warnings: list[tuple[float, str]] = []

    def until(
        self, end: float, alive: bool = True, tokens: int = 0, fail: str = "", short: bool = False, expire: float = 0
    ) -> str:
        """Let time pass; the reason of a stop, or "". short: leases are a second old; expire: so often they do."""
        while self.now < end:
            self.now += 1.0
            if self.learner:
                self.watchdog.asked(self.now)
            if fail:
                self.watchdog.failed(fail, self.now)
            self.sight = replace(self.sight, tokens=self.sight.tokens + tokens)
            if alive:
                self.sight = replace(self.sight, last_seen=self.now)
            if expire and self.now % expire == 0:
                self.sight = replace(self.sight, num_expired=self.sight.num_expired + 8)
            if short:
                self.sight = replace(self.sight, oldest_lease=self.now - 1)
            stop, warning = self.watchdog.check(self.sight, self.now)
            if warning:
                self.warnings.append((self.now, warning))
            if stop:
                return stop
        return ""


def test_a_fleet_that_is_gone_ends_the_run_when_the_limit_is_over_and_not_before():
    run = Run(replace(WORKING, num_alive=0, num_leased=0))
    assert run.until(99, alive=False) == ""
    stop = run.until(100, alive=False)
    assert stop == "nothing can progress: every generator is gone, the last one was heard 100 s ago"


def test_a_generator_that_came_back_gets_its_time():
    run = Run(replace(WORKING, num_alive=0, num_leased=0))
    assert run.until(95, alive=False) == ""
    run.sight = replace(run.sight, num_alive=1, last_seen=95.0, num_leased=4, oldest_lease=95.0)
    assert run.until(250, tokens=5) == ""
    assert len(run.warnings) == 2


def test_no_generator_at_all_is_named():
    run = Run(replace(WORKING, num_alive=0, num_leased=0, last_seen=None))
    assert run.until(100, alive=False) == "nothing can progress: no generator joined within 100 s (run.watchdog_s)"


def test_the_first_failure_since_the_last_progress_is_the_cause():
    run = Run(WORKING)
    run.until(20, fail="g0: TaskError: an old one", short=True)
    run.watchdog.progress(20.0)
    run.until(21, fail="g0: TaskError: the verifier is broken", short=True)
    assert run.until(119, fail="g1: RouteError: a later one", short=True) == ""
    stop = run.until(120, fail="g1: RouteError: a later one", short=True)
    assert "every lease or generator fails; first cause: g0: TaskError: the verifier is broken" in stop


def test_one_early_failure_among_long_leases_is_a_slow_run():
    run = Run(WORKING)
    run.until(2, fail="g0: TaskError: once", tokens=5)
    assert run.until(400, tokens=5) == ""
    assert [now for now, _ in run.warnings] == [100.0, 200.0, 300.0, 400.0]
    text = run.warnings[0][1]
    assert "nothing was achieved for 100 s: 3 of 4 groups for update 7" in text
    assert "2 generators alive, 8 leases running, tokens are being sampled; first failure: g0: TaskError: once" in text


def test_failures_do_not_end_a_run_while_some_lease_only_takes_long():
    # Everything fails every second but for one lease that runs since 0: it may still come.
    assert Run(WORKING).until(300, fail="g0: TaskError: x") == ""


def test_expired_leases_are_slow_and_not_failed():
    run = Run(replace(WORKING, num_expired=3))
    assert run.until(300, fail="g0: TaskError: x", tokens=5, short=True) == ""


def test_leases_that_expire_again_and_again_without_a_token_end_the_run():
    # Engines that hang: their generators are alive, or start again and again.
    run = Run(WORKING)
    assert run.until(99, expire=30, short=True, fail="g0: EngineError: the engine hangs") == ""
    stop = run.until(100, expire=30, short=True)
    assert "leases expire again and again, and no token was sampled for 100 s; first cause: g0: EngineError" in stop


def test_leases_that_expire_once_or_while_tokens_are_sampled_only_warn():
    run = Run(WORKING)
    assert run.until(300, expire=40, tokens=5, short=True) == "" and len(run.warnings) == 3
    assert run.until(399, expire=40, short=True) == ""
    assert "expire again and again" in run.until(400, short=True)
    run = Run(WORKING)
    run.until(120, tokens=1)
    run.watchdog.progress(120.0)
    assert run.until(121, expire=121) == ""
    assert run.until(500) == "", "they may have expired when the fleet was about to begin"


def test_only_tokens_between_two_heartbeats_of_one_process_count():
    peers = Peers()
    hello = Hello(SCHEMA, "generator", "g0", "b0", [], 0, 0, 0, "")
    peers.join(b"a", hello, 0.0)
    rises = []
    for boot, tokens in (("b0", 32.0), ("b0", 32.0), ("b0", 40.0), ("b1", 48.0), ("b1", 48.0), ("b1", math.nan)):
        if boot != hello.boot_id:
            hello = replace_struct(hello, boot_id=boot)
            peers.join(b"b", hello, 0.0)
        peers.beat("g0", {"tokens": tokens}, [])
        rises.append(peers.num_rises)
    # What a process samples before its first heartbeat is its start-up probe.
    assert rises == [0, 0, 1, 1, 1, 1]


def test_generators_that_live_and_get_no_lease_end_the_run_with_why_their_loads_fail():
    run = Run(replace(WORKING, num_leased=0))
    run.until(1, fail="g0: WeightSyncError: no such file")
    stop = run.until(100)
    assert "no generator had a lease for 100 s (run.watchdog_s), 2 alive; first cause: g0: WeightSyncError" in stop


def test_tokens_without_a_lease_are_signs_of_life():
    run = Run(replace(WORKING, num_leased=0))
    assert run.until(300, tokens=1) == ""
    assert run.until(399) == ""
    assert run.until(400).startswith("nothing can progress")


@pytest.mark.parametrize(
    ("changes", "learner", "words"),
    [
        (
            {"waiting": ""},
            False,
            "the learner has not asked for groups for 100 s (a long step, weights.paused, or it is gone)",
        ),
        ({}, False, "the learner has not asked for groups for 100 s"),
        ({"published": False}, True, "the learner has published no version yet"),
    ],
)
def test_without_a_learner_that_waits_a_dead_fleet_only_warns(changes, learner, words):
    run = Run(replace(WORKING, num_alive=0, num_leased=0, **changes), learner=learner)
    assert run.until(150, alive=False) == ""
    assert len(run.warnings) == 1 and words in run.warnings[0][1]


def test_progress_starts_the_time_anew():
    run = Run(replace(WORKING, num_leased=0))
    for at in range(50, 500, 50):
        assert run.until(at) == ""
        run.watchdog.progress(float(at))
        run.watchdog.check(replace(run.sight, num_leased=1), run.now)
    assert run.warnings == []


def test_a_generator_that_loads_weights_is_busy():
    peers = Peers()
    peers.join(b"a", Hello(SCHEMA, "generator", "g0", "b0", [], 0, 0, 0, ""), 0.0)
    for loading in (1.0, 1.0, 0.0):
        peers.beat("g0", {"tokens": 5.0, "loading": loading}, [])
    assert peers.num_rises == 2
