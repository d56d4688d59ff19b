"""Failed groups: logged sparsely and readably, told to replay soon, and followed by a pause."""

from __future__ import annotations

import asyncio
import logging
import math
import time

import pytest

from asyncrl.generator import beats
from asyncrl.generator.beats import Beats
from asyncrl.generator.failures import Failures, visible
from asyncrl.generator.loop import Generator
from asyncrl.replay.ledger import State
from tests.generator.test_scoring import QUICK
from tests.generator.test_timeouts import Rig
from tests.helpers.char_model import save_char_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_char_model(tmp_path_factory.mktemp("char") / "model", steps=0)


@pytest.fixture
def make_rig(folder, tmp_path):
    rigs: list[Rig] = []

    def make(scorer: str, **changes) -> Rig:
        rigs.append(Rig(folder, tmp_path, scorer=f"tests.generator.failing_verifier:{scorer}", **(QUICK | changes)))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def test_of_one_kind_of_warning_the_first_and_then_every_hundredth_is_logged(caplog):
    failures = Failures()
    for i in range(12_084):
        failures.failed(f"l{i}", "TaskError: 8 of 8 responses not scored", 0.0)
    failures.failed("other", "timeout: none of 8", 0.0)
    lines = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(lines) == 20 + 120 + 1
    assert lines[0] == "lease l0 failed: TaskError: 8 of 8 responses not scored"
    assert "(number 12000 of its kind)" in lines[-2] and lines[-1] == "lease other failed: timeout: none of 8"


def test_the_pause_grows_to_a_second_while_all_fail_and_ends_with_an_answer():
    failures = Failures()
    pauses = []
    for _ in range(2_000):
        failures.failed("l", "TaskError: no", 100.0)
        pauses.append(failures.until - 100.0)
    assert pauses[0] == pytest.approx(0.02) and pauses[1] == pytest.approx(0.04) and pauses[-1] == pytest.approx(1.0)
    failures.succeeded()
    assert failures.until == 0.0
    failures.failed("l", "TaskError: no", 100.0)
    assert failures.until == pytest.approx(100.02)


def test_control_characters_are_made_visible_and_letters_stay():
    assert visible("\x1b[31m\u00e9 \u6570\n\x00\u202e") == "\\x1b[31m\u00e9 \u6570\\n\\x00\\u202e"
    assert visible("\udc80") == "\\udc80"


def test_what_users_code_said_reaches_the_log_and_replay_without_control_characters(make_rig, caplog):
    rig = make_rig("coloured")

    async def scenario(rig: Rig, generator: Generator) -> None:
        await rig.until(lambda: rig.queue.tally.counters["failed_taskerror"] >= 2)
        assert generator.failures.until > 0

    asyncio.run(rig.run(scenario))
    said = [r.message for r in caplog.records if "no\\nidea" in r.message]
    assert said and "\\x1b[2J" in said[0]
    assert not [r.message for r in caplog.records if "\x1b" in r.message or "\n" in r.message]


def test_no_work_is_asked_for_in_the_pause(make_rig):
    rig = make_rig("sometimes")

    async def scenario(rig: Rig, generator: Generator) -> None:
        generator.failures.until = math.inf
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            await rig.step()
        assert generator.asked_at is None and not generator.running
        generator.failures.until = 0.0
        await rig.until(lambda: rig.queue.ledger.count(State.QUEUED) >= 1)

    asyncio.run(rig.run(scenario))


def test_failures_of_scoring_are_told_before_the_group_that_has_them(make_rig, monkeypatch):
    # A record that is made of this group would not have them otherwise.
    monkeypatch.setattr(beats, "HEARTBEAT_S", math.inf)
    monkeypatch.setattr(beats, "SOON_S", 0.0)
    rig = make_rig("sometimes")

    async def scenario(rig: Rig, generator: Generator) -> None:
        await rig.until(lambda: rig.queue.ledger.count(State.QUEUED) >= 1)
        assert rig.server.peers.generators["g0"].gauges["verifier_errors"] >= 2

    asyncio.run(rig.run(scenario))


def test_the_counters_are_told_before_a_generator_leaves(make_rig, monkeypatch):
    monkeypatch.setattr(beats, "HEARTBEAT_S", math.inf)
    monkeypatch.setattr(beats, "SOON_S", math.inf)
    rig = make_rig("sometimes")

    async def scenario(rig: Rig, generator: Generator) -> None:
        await rig.until(lambda: rig.queue.ledger.count(State.QUEUED) >= 1)
        assert "verifier_errors" not in rig.server.peers.generators["g0"].gauges

    asyncio.run(rig.run(scenario))
    rig.server.step(0.1)
    assert rig.server.peers.generators["g0"].gauges["verifier_errors"] >= 2


def test_a_heartbeat_is_due_each_second_and_sooner_when_something_failed():
    due = Beats()
    due.sent(10.0, 0.0)
    assert [due.due(at, 0.0) for at in (10.1, 10.9, 11.0)] == [False, False, True]
    assert [due.due(at, 1.0) for at in (10.1, 10.3)] == [False, True]
    due.sent(10.3, 1.0)
    assert not due.due(10.9, 1.0)
