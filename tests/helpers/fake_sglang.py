"""A server that speaks SGLang's API and computes nothing, for what a real one does only when it fails."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import numpy as np
from aiohttp import web

from asyncrl.types import ModelInfo

INFO = ModelInfo(layers=(0, 1), num_experts=8, top_k=2, vocab_size=16)
LAYERS = 2
Json = dict[str, Any]


class Call(NamedTuple):
    """One request that came: path, the key after "Bearer " (None without), body."""

    path: str
    key: str | None
    body: Json | None


class FakeSglang:
    """`async with FakeSglang() as fake`: serves at fake.url in the running loop; tests set what it does.

    hold: requests run until they are aborted, or until `finish`. label: of its weights. edit: changes a reply before
    it goes out. handlers: by path, an answer instead of the usual one.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.hold = self.deaf = False
        self.label, self.spans = "base", None
        self.edit: Callable[[Json, Json], None] = lambda reply, body: None
        self.handlers: dict[str, Callable[[web.Request, Json | None], Awaitable[web.StreamResponse]]] = {}
        self.running: dict[str, asyncio.Future[str]] = {}
        self.bodies: list[Json] = []
        self.changed = asyncio.Condition()

    async def __aenter__(self) -> FakeSglang:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = "http://127.0.0.1:{1}".format(*self._runner.addresses[0])
        return self

    async def __aexit__(self, *exc: object) -> None:
        for future in self.running.values():
            future.cancel()
        await self._runner.cleanup()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition on what came, at most 10 s."""
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(condition)

    def finish(self, rid: str | None = None) -> None:
        """Let one held request end, or all."""
        for each in [rid] if rid else list(self.running):
            if not self.running[each].done():
                self.running[each].set_result("length")

    def of(self, path: str) -> list[Call]:
        """The calls of one path."""
        return [call for call in self.calls if call.path == path]

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        key = request.headers.get("Authorization")
        self.calls.append(Call(request.path, key and key.removeprefix("Bearer "), body))
        await self._notify()
        if request.path in self.handlers:
            return await self.handlers[request.path](request, body)
        match request.path:
            case "/generate":
                assert body is not None
                return web.json_response(await self._generate(body))
            case "/abort_request":
                assert body is not None
                future = self.running.get(body["rid"])
                if future is not None and not future.done() and not self.deaf:
                    future.set_result("abort")
                return web.Response()
            case "/health_generate":
                return web.Response()
        return web.json_response({"success": True, "message": ""})

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def _generate(self, body: Json) -> Json:
        self.bodies.append(body)
        end = "length"
        if self.hold:
            future = self.running[body["rid"]] = asyncio.get_running_loop().create_future()
            await self._notify()
            try:
                end = await future
            finally:
                del self.running[body["rid"]]
                with contextlib.suppress(asyncio.CancelledError):
                    await self._notify()
        reply = honest(body, self.label, end)
        self.edit(reply, body)
        return reply


def honest(body: Json, label: str = "base", end: str = "length") -> Json:
    """What a server that works answers to body: token ids 2, 3, 4, ...; half of them when aborted."""
    count = body["sampling_params"]["max_new_tokens"]
    if end == "abort":
        count //= 2
    tokens = [2 + i % 10 for i in range(count)]
    finish: Json = {"type": end, "length": count}
    if end == "abort":
        finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    meta: Json = {
        "id": body["rid"],
        "finish_reason": finish,
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": count,
        "cached_tokens": 0,
        "num_retractions": 0,
        "weight_version": label,
        "weight_versions": [{"version": label, "start": 0, "end": count}],
        "output_token_logprobs": [[-0.5 - i, token, None] for i, token in enumerate(tokens)],
    }
    if body.get("return_routed_experts"):
        meta["routed_experts"] = routes_of(len(body["input_ids"]) + count)
    return {"text": "", "output_ids": tokens, "meta_info": meta}


def routes_of(num_tokens: int) -> str:
    """Routed experts of S tokens for INFO: the row's number and the next, modulo E, in both layers."""
    rows = np.arange(num_tokens - 1)[:, None, None] + np.array([0, 1])
    ids = np.broadcast_to(rows % INFO.num_experts, (num_tokens - 1, LAYERS, 2))
    return base64.b64encode(np.ascontiguousarray(ids, "<i4").tobytes()).decode()
