"""What SglangEngine does when the server misbehaves; a server that works is in tests/sglang/test_generate.py."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from asyncrl.engines.base import Turn
from asyncrl.engines.sglang.client import Client
from asyncrl.engines.sglang_engine import SglangEngine
from asyncrl.errors import EngineError, RouteError, TrajectoryError, WeightSyncError
from asyncrl.types import SamplingParams, Segment, Version
from tests.helpers.fake_sglang import INFO, LAYERS, FakeSglang

PROMPT = np.array([3, 4, 5], np.int32)
EIGHT = SamplingParams(temperature=0.7, max_new_tokens=8, stop_token_ids=())


class FakeUpdater:
    """Sets the fake's label; `during` runs in the middle of an update, `torn_by` breaks it there."""

    def __init__(self, fake: FakeSglang) -> None:
        self.fake, self.torn, self.resets = fake, False, 0
        self.during: Callable[[], Awaitable[None]] | None = None
        self.fails: tuple[bool, str] | None = None

    async def reset(self) -> None:
        self.resets += 1

    async def update(self, label: str, source: Any) -> None:
        if self.during is not None:
            await self.during()
        if self.fails is not None:
            self.torn, reason = self.fails
            raise WeightSyncError(reason)
        self.fake.label, self.torn = label, False


@contextlib.asynccontextmanager
async def serving(
    answer_s: float = 5.0, api_key: str | None = None, admin_key: str | None = None
) -> AsyncIterator[tuple[FakeSglang, SglangEngine, FakeUpdater]]:
    async with FakeSglang() as fake:
        updater = FakeUpdater(fake)
        engine = await SglangEngine.open(
            Client(fake.url, api_key, admin_key, answer_s), INFO, num_hidden_layers=LAYERS, label="base",
            max_length=64, name="g0", updater=updater, answer_s=answer_s,
        )  # fmt: skip
        try:
            yield fake, engine, updater
        finally:
            # close blocks until the fake has answered its aborts.
            await asyncio.to_thread(engine.close)


def run(job: Callable[[FakeSglang, SglangEngine, FakeUpdater], Awaitable[None]], **options: Any) -> None:
    """Run a job against a fake server and its engine, at most 60 s."""

    async def main() -> None:
        async with asyncio.timeout(60), serving(**options) as (fake, engine, updater):
            await job(fake, engine, updater)

    asyncio.run(main())


def test_samples_are_of_the_prompt_with_ids_of_their_own():
    async def job(fake, engine, updater):
        done = await engine.generate(PROMPT, 3, EIGHT)
        assert [c.token_ids.tolist() for c in done] == [[2, 3, 4, 5, 6, 7, 8, 9]] * 3
        assert done[0].logprobs.tolist() == [-0.5 - i for i in range(8)]
        assert done[0].segments == (Segment(Version(0, -1), 0, 8),)
        assert done[0].routes.shape == (10, 2, 2) and done[0].routes.dtype == np.uint8
        assert done[0].routes[3].tolist() == [[3, 4], [3, 4]]
        assert (done[0].finish_reason, done[0].routes_from) == ("length", 0)
        rids = [body["rid"] for body in fake.bodies]
        assert len(set(rids)) == 3 and all(rid.startswith("g0-") for rid in rids)
        stats = engine.stats()
        assert (stats["tokens"], stats["prompt_tokens"], stats["running"]) == (24, 9, 0)
        assert stats["busy_s"] > 0

    run(job)


@pytest.mark.parametrize("form", ["full", "crop"])
def test_a_turn_sends_its_whole_prompt_and_asks_for_the_rows_that_are_missing(form):
    async def job(fake, engine, updater):
        def crop(reply, body):
            rows = np.frombuffer(base64.b64decode(reply["meta_info"]["routed_experts"]), "<i4").reshape(-1, LAYERS, 2)
            reply["meta_info"]["routed_experts"] = base64.b64encode(
                rows[body["routed_experts_start_len"] :].tobytes()
            ).decode()

        fake.edit = crop if form == "crop" else fake.edit
        prompt, rows = PROMPT, []
        for turn in range(3):
            known = sum(map(len, rows))
            (done,) = await engine.generate(prompt, 1, EIGHT, turn=Turn("c", known))
            assert fake.bodies[-1]["input_ids"] == prompt.tolist()
            assert fake.bodies[-1]["routed_experts_start_len"] == known == (len(prompt) - 3 if turn else 0)
            rows.append(done.routes)
            prompt = np.concatenate((prompt, done.token_ids, [4, 5])).astype(np.int32)
        (whole,) = await engine.generate(prompt, 1, EIGHT)
        np.testing.assert_array_equal(np.concatenate(rows), whole.routes[: len(prompt) - 3])
        # What the server may take from its cache is of the version that is sampled with, and of no other.
        await engine.load(Version(0, 4), None)
        await engine.generate(prompt, 1, EIGHT, turn=Turn("c", len(prompt) - 3))
        keys = [body["extra_key"] for body in fake.bodies]
        assert len(set(keys[:4])) == 1 and keys[4] not in keys[:4]
        engine.forget("c")
        for n, bad, words in ((2, 0, "n=2 samples of a turn"), (1, len(prompt), "rows=")):
            with pytest.raises(EngineError, match=words):
                await engine.generate(prompt, n, EIGHT, turn=Turn("c", bad))
        assert len(fake.bodies) == 5

    run(job)


def test_limit_aborts_what_runs_and_keeps_what_is_finished_in_order():
    async def job(fake, engine, updater):
        fake.hold = True
        work = asyncio.ensure_future(engine.generate(PROMPT, 3, EIGHT, limit_s=1.0))
        await fake.until(lambda: len(fake.running) == 3)
        first, second, third = list(fake.running)
        fake.finish(third)
        fake.finish(first)
        done = await work
        assert len(done) == 2 and all(len(c.token_ids) == 8 for c in done)
        assert [call.body for call in fake.of("/abort_request")] == [{"rid": second, "abort_all": False}]
        assert not fake.running and engine.stats()["running"] == 0

    run(job)


def test_cut_gives_what_is_finished():
    async def job(fake, engine, updater):
        fake.hold, cut = True, asyncio.Event()
        work = asyncio.ensure_future(engine.generate(PROMPT, 2, EIGHT, None, cut))
        await fake.until(lambda: len(fake.running) == 2)
        cut.set()
        assert await work == []
        assert not fake.running

    run(job)


def test_cancelling_aborts_in_the_background():
    async def job(fake, engine, updater):
        fake.hold = True
        work = asyncio.ensure_future(engine.generate(PROMPT, 2, EIGHT))
        await fake.until(lambda: len(fake.running) == 2)
        rids = set(fake.running)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        await fake.until(lambda: len(fake.of("/abort_request")) == 2)
        assert {call.body["rid"] for call in fake.of("/abort_request")} == rids

    run(job)


def test_an_engine_that_ignores_aborts_hangs():
    async def job(fake, engine, updater):
        fake.hold = fake.deaf = True
        with pytest.raises(EngineError, match=r"127.0.0.1:\d+ hangs: 2 aborted requests.* within 1 s"):
            await engine.generate(PROMPT, 2, EIGHT, limit_s=0.1)

    run(job, answer_s=1.0)


def test_silence_while_requests_run_fails_all_of_them():
    async def job(fake, engine, updater):
        async def unhealthy(request, body):
            return web.Response(status=503)

        fake.hold, fake.handlers["/health_generate"] = True, unhealthy
        jobs = [asyncio.ensure_future(engine.generate(PROMPT, 2, EIGHT)) for _ in range(2)]
        for work in jobs:
            with pytest.raises(
                EngineError, match=r"127.0.0.1:\d+ hangs: no sign of life for \d+ s; GET .*health.* 503"
            ):
                await work
        with pytest.raises(EngineError, match="hangs"):
            await engine.generate(PROMPT, 1, EIGHT)

    run(job, answer_s=1.0)


def test_a_healthy_server_may_take_its_time():
    async def job(fake, engine, updater):
        fake.hold = True
        work = asyncio.ensure_future(engine.generate(PROMPT, 1, EIGHT))
        await fake.until(lambda: len(fake.of("/health_generate")) >= 8)
        fake.finish()
        assert len(await work) == 1

    run(job, answer_s=1.0)


def test_errors_of_the_server_name_it_and_end_the_other_samples():
    async def job(fake, engine, updater):
        async def broken(request, body):
            if len(fake.of("/generate")) == 2:
                return web.json_response({"error": {"message": "CUDA error"}}, status=500)
            await asyncio.sleep(30)
            raise AssertionError

        fake.handlers["/generate"] = broken
        with pytest.raises(EngineError, match=r"POST http://127.0.0.1:\d+/generate was refused with 500: CUDA error"):
            await engine.generate(PROMPT, 2, EIGHT)
        await fake.until(lambda: len(fake.of("/abort_request")) >= 1)

    run(job)


def test_a_connection_lost_in_mid_answer_is_an_error():
    async def job(fake, engine, updater):
        async def dies(request, body):
            response = web.StreamResponse(headers={"Content-Length": "1000"})
            await response.prepare(request)
            await response.write(b'{"output_ids": [1')
            request.transport.abort()
            return response

        fake.handlers["/generate"] = dies
        with pytest.raises(EngineError, match=r"POST http://127.0.0.1:\d+/generate failed, waiting for its answer"):
            await engine.generate(PROMPT, 1, EIGHT)

    run(job)


def test_a_sample_that_the_server_aborts_is_asked_for_again_twice():
    async def job(fake, engine, updater):
        def abort(times):
            def edit(reply, body):
                if len(fake.bodies) <= times:
                    reply["meta_info"]["finish_reason"] = {"type": "abort", "message": "no memory"}

            return edit

        fake.edit = abort(2)
        assert len(await engine.generate(PROMPT, 1, EIGHT)) == 1
        assert len({body["rid"] for body in fake.bodies}) == 3 and engine.stats()["resampled"] == 2
        fake.bodies.clear()
        fake.edit = abort(3)
        with pytest.raises(EngineError, match=r"aborted 3 requests, the last g0-\w+: no memory"):
            await engine.generate(PROMPT, 1, EIGHT)

    run(job)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("routed_experts", None, RouteError),
        ("output_token_logprobs", [[-1.0, 2, None]], TrajectoryError),
        ("weight_versions", [{"version": "9.9", "start": 0, "end": 8}], EngineError),
    ],
)
def test_a_sample_that_cannot_be_used_fails_the_group_by_name(field, value, error):
    async def job(fake, engine, updater):
        fake.edit = lambda reply, body: reply["meta_info"].update({field: value})
        with pytest.raises(error, match=r"g0-[0-9a-f]{32}: "):
            await engine.generate(PROMPT, 2, EIGHT)

    run(job)


def test_requests_wait_for_a_load_and_carry_its_version_after():
    async def job(fake, engine, updater):
        started, go = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        async def during():
            loop.call_soon_threadsafe(started.set)
            while not go.is_set():
                await asyncio.sleep(0.01)

        updater.during = during
        load = asyncio.ensure_future(engine.load(Version(0, 4), None))
        await started.wait()
        assert await engine.generate(PROMPT, 2, EIGHT, limit_s=0.2) == []
        work = asyncio.ensure_future(engine.generate(PROMPT, 1, EIGHT))
        while engine.stats()["waiting"] < 1:
            await asyncio.sleep(0.01)
        assert not fake.bodies
        go.set()
        await load
        (done,) = await work
        assert done.segments == (Segment(Version(0, 4), 0, 8),) and engine.version == Version(0, 4)
        assert engine.stats()["loads"] == 1
        before = fake.bodies[-1]["extra_key"]
        updater.during = None
        await engine.load(Version(0, 5), None)
        await engine.generate(PROMPT, 1, EIGHT)
        after = fake.bodies[-1]["extra_key"]
        assert "/0.4+" in before and "/0.5+" in after and before.rpartition("+")[2] == after.rpartition("+")[2]
        with pytest.raises(WeightSyncError, match=r"0\.4 is older than 0\.5"):
            await engine.load(Version(0, 4), None)

    run(job)


def test_running_responses_carry_both_versions():
    async def job(fake, engine, updater):
        fake.hold = True
        work = asyncio.ensure_future(engine.generate(PROMPT, 1, EIGHT))
        await fake.until(lambda: len(fake.running) == 1)
        await engine.load(Version(0, 4), None)
        spans = [{"version": "base", "start": 0, "end": 3}, {"version": fake.label, "start": 3, "end": 8}]
        fake.edit = lambda reply, body: reply["meta_info"].update(weight_versions=spans, num_retractions=1)
        fake.finish()
        (done,) = await work
        assert done.segments == (Segment(Version(0, -1), 0, 3), Segment(Version(0, 4), 3, 8))
        assert done.routes_from == 2 + 3

    run(job)


def test_a_version_that_is_loaded_again_has_another_name_and_cache():
    async def job(fake, engine, updater):
        await engine.load(Version(0, 4), None)
        first = fake.label
        await engine.load(Version(0, 4), None)
        # What was cached under the first name may be of other weights.
        assert fake.label.startswith(f"{first}.")
        assert engine.version == Version(0, 4)
        (done,) = await engine.generate(PROMPT, 1, EIGHT)
        assert done.segments == (Segment(Version(0, 4), 0, 8),)
        labels = {first, fake.label}
        await engine.load(Version(0, 4), None)
        assert fake.label not in labels

    run(job)


def test_weights_that_another_run_calls_by_the_same_version_are_not_ours():
    async def job(fake, engine, updater):
        await engine.load(Version(0, 4), None)
        assert fake.label.startswith("0.4+")
        fake.label = "0.4+00000000"
        with pytest.raises(EngineError, match="this run never loaded"):
            await engine.generate(PROMPT, 1, EIGHT)

    run(job)


def test_a_limit_during_a_load_does_not_wait_for_the_paused_server():
    async def job(fake, engine, updater):
        fake.hold = fake.deaf = True
        work = asyncio.ensure_future(engine.generate(PROMPT, 2, EIGHT, limit_s=0.5))
        await fake.until(lambda: len(fake.running) == 2)
        ended = asyncio.Event()

        async def during():
            while not ended.is_set():
                await asyncio.sleep(0.01)

        updater.during = during
        load = asyncio.ensure_future(engine.load(Version(0, 4), None))
        assert await work == []
        await fake.until(lambda: len(fake.of("/abort_request")) == 2)
        ended.set()
        await load

    run(job, answer_s=30.0)


def test_a_stale_prefix_is_sampled_again():
    async def job(fake, engine, updater):
        fake.hold = True
        work = asyncio.ensure_future(engine.generate(PROMPT, 1, EIGHT))
        await fake.until(lambda: len(fake.running) == 1)
        await engine.load(Version(0, 4), None)
        # It began after the load, on a prompt that was computed before.
        fake.hold, fake.edit = False, lambda reply, body: reply["meta_info"].update(cached_tokens=2)
        fake.finish()
        (done,) = await work
        assert len(fake.bodies) == 2 and engine.stats()["stale_prefix"] == 1
        assert done.extra["cached_tokens"] == 2 and done.segments[0].version == Version(0, 4)

    run(job)


def test_a_torn_server_samples_nothing_until_a_load_succeeds():
    async def job(fake, engine, updater):
        updater.fails = (False, "no such folder")
        with pytest.raises(WeightSyncError, match="no such folder"):
            await engine.load(Version(0, 4), None)
        assert len(await engine.generate(PROMPT, 1, EIGHT)) == 1 and engine.version == Version(0, -1)
        updater.fails = (True, "a bucket was lost")
        with pytest.raises(WeightSyncError, match="a bucket was lost"):
            await engine.load(Version(0, 4), None)
        assert engine.torn and engine.version == Version(0, -1)
        assert await engine.generate(PROMPT, 1, EIGHT, limit_s=0.2) == []
        work = asyncio.ensure_future(engine.generate(PROMPT, 1, EIGHT))
        updater.fails = None
        await engine.load(Version(0, 5), None)
        assert (await work)[0].segments[0].version == Version(0, 5)

    run(job)


def test_a_server_that_falls_back_to_its_first_weights_is_found_out():
    async def job(fake, engine, updater):
        await engine.load(Version(0, 4), None)
        fake.label = "base"
        with pytest.raises(EngineError, match=r"version 0\.-1 though 0\.4 was loaded before; the server was restarted"):
            await engine.generate(PROMPT, 1, EIGHT)

    run(job)


def test_close_ends_what_waits_and_aborts_it():
    async def main():
        async with serving() as (fake, engine, _):
            fake.hold = True
            work = asyncio.ensure_future(engine.generate(PROMPT, 2, EIGHT))
            await fake.until(lambda: len(fake.running) == 2)
            await asyncio.to_thread(engine.close)
            with pytest.raises(EngineError, match="closed"):
                await work
            assert len(fake.of("/abort_request")) >= 2
            with pytest.raises(EngineError, match="closed"):
                await engine.generate(PROMPT, 1, EIGHT)
            engine.close()

    asyncio.run(main())


def test_keys_go_where_they_belong():
    async def job(fake, engine, updater):
        fake.hold = True
        work = asyncio.ensure_future(engine.generate(PROMPT, 1, EIGHT, limit_s=0.3))
        assert await work == []
        assert {call.key for call in fake.of("/generate")} == {"sesame"}
        assert {call.key for call in fake.of("/abort_request")} == {"master"}

    run(job, api_key="sesame", admin_key="master")


def test_a_seed_of_a_request_is_refused():
    async def job(fake, engine, updater):
        with pytest.raises(EngineError, match="--random-seed"):
            await engine.generate(PROMPT, 1, SamplingParams(1.0, 4, (), seed=3))

    run(job)


def test_requests_that_do_not_fit_are_refused_before_they_are_sent():
    async def job(fake, engine, updater):
        with pytest.raises(EngineError, match="exceeds the engine's limit of 64"):
            await engine.generate(PROMPT, 1, SamplingParams(1.0, 62, ()))
        assert not fake.bodies

    run(job)


def test_a_server_that_cannot_be_reset_is_refused():
    class Stuck(FakeUpdater):
        async def reset(self):
            raise WeightSyncError("pausing: no answer")

    async def main():
        async with FakeSglang() as fake:
            with pytest.raises(EngineError, match=r"127.0.0.1:\d+ cannot be used: pausing: no answer"):
                await SglangEngine.open(
                    Client(fake.url), INFO, num_hidden_layers=LAYERS, label="base", max_length=64, name="g0",
                    updater=Stuck(fake),
                )  # fmt: skip

    asyncio.run(main())
