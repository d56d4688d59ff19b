"""Live settings reach a running generator, and it says with its heartbeat which it has."""

import asyncio
import json

import pytest

from asyncrl import wire
from asyncrl.config import validate
from asyncrl.types import Version
from tests.generator import test_loading
from tests.generator.test_loading import fleet, publish, publisher, replay, until  # noqa: F401  (fixtures)

KEY = "generator.groups_in_flight"


def settings(seq, value):
    return wire.Settings(wire.Tuned(seq, {KEY: json.dumps(value)}))


def test_groups_in_flight_follow_and_the_heartbeat_says_so(replay, publisher, tmp_path):  # noqa: F811
    async def scenario():
        async with fleet(tmp_path) as (made, _):
            publish(replay, publisher, Version(0, 0))
            await until(lambda: len(replay.beats) == 3)
            assert {g["tuned"] for _, g in replay.beats.values()} == {0.0}
            name, generator = next(iter(made.items()))
            size, configured = generator.config.algorithm.group_size, generator.groups_in_flight
            replay.say(name, settings(3, 1))
            await until(lambda: replay.beats[name][1]["tuned"] == 3.0)
            assert generator._free_rows() == size
            # Its KV cache has the configured size, whatever another config of the run says.
            replay.say(name, settings(4, configured + 5))
            await until(lambda: replay.beats[name][1]["tuned"] == 4.0)
            assert generator._free_rows() == configured * size
            replay.say(name, wire.Settings(wire.Tuned(5)))
            await until(lambda: replay.beats[name][1]["tuned"] == 5.0)
            assert generator.groups_in_flight == configured

    asyncio.run(scenario())


@pytest.mark.parametrize(("engine", "carrier", "expected"), [("sglang", "disk", 40), ("torch", "shm", 32)])
@pytest.mark.usefixtures("replay")
def test_a_server_takes_more_than_configured(engine, carrier, expected, monkeypatch, tmp_path):
    tree = {"model": {"path": "m"}, "generator": {"engine": engine}, "weights": {"carrier": carrier}}
    monkeypatch.setattr(test_loading, "CONFIG", validate(tree))

    async def scenario():
        async with fleet(tmp_path) as (made, _):
            generator = next(iter(made.values()))
            generator._handle(wire.Welcome(0, 0, None, "b", settings(1, 40).tuned))
            assert (generator.tuned, generator.groups_in_flight) == (1, expected)

    asyncio.run(scenario())
