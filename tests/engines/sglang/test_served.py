"""What a generator is told when its server ends, and the probe of one that was left in the middle of an update."""

import asyncio

import pytest

from asyncrl.engines.base import Turn
from asyncrl.engines.sglang.client import Unreachable
from asyncrl.engines.sglang.served import Served
from asyncrl.errors import EngineError, RouteError, WeightSyncError
from asyncrl.types import SamplingParams, Version

SAMPLING = SamplingParams(1.0, 4, ())


class Weights:
    """A stand-in for an engine."""

    def __init__(self, fail=False, error=None):
        self.version, self.loads, self.fail, self.closed = Version(0, -1), 0, fail, False
        self.error = error

    def describe(self):
        return "info"

    async def generate(self, *args):
        if self.error is not None:
            raise self.error
        return list(args)

    async def load(self, version, source):
        if self.fail:
            raise WeightSyncError("half")
        self.version, self.loads = version, self.loads + 1

    def stats(self):
        return {"loads": float(self.loads)}

    def close(self):
        self.closed = True


def lives():
    pass


def test_a_lost_connection_is_explained_by_the_end_of_the_server():
    looks = []

    def ended():
        looks.append(1)
        if len(looks) == 3:  # the process ends a little later than its connections
            raise EngineError("the server of g0 ended with signal 9: out of memory")

    engine = Served(Weights(error=Unreachable("connection lost")), ended)
    with pytest.raises(EngineError, match="ended with signal 9: out of memory") as caught:
        asyncio.run(engine.generate("ids", 1, SAMPLING))
    assert isinstance(caught.value.__context__, Unreachable)


@pytest.mark.parametrize("error", [Unreachable("no route"), RouteError("rows"), EngineError("refused")])
def test_the_errors_of_a_server_that_lives_stay(error):
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(Served(Weights(error=error), lives).generate("ids", 1, SAMPLING))


def test_it_is_probed_after_its_first_load_and_only_then():
    proven = []

    async def prove():
        proven.append(inner.version)

    async def run():
        with pytest.raises(WeightSyncError):
            await engine.load(Version(0, 0), None)
        inner.fail = False
        for update in (0, 1):
            await engine.load(Version(0, update), None)

    inner = Weights(fail=True)
    engine = Served(inner, lives, prove)
    asyncio.run(run())
    assert proven == [Version(0, 0)] and engine.version == Version(0, 1)
    assert engine.describe() == "info" and engine.stats() == {"loads": 2.0}
    turn = Turn("c", 3)
    assert asyncio.run(engine.generate("ids", 1, SAMPLING, turn=turn)) == ["ids", 1, SAMPLING, None, None, turn]
    engine.close()
    assert inner.closed


def test_one_that_fails_the_probe_is_no_load_that_may_be_tried_again():
    async def prove():
        raise EngineError("the engine failed the start-up probe")

    with pytest.raises(EngineError, match="start-up probe"):
        asyncio.run(Served(Weights(), lives, prove).load(Version(0, 0), None))
