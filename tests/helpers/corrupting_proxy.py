"""A reverse proxy in front of a real SGLang server that corrupts chosen replies, as broken builds were seen to.

    with CorruptingProxy(server.url, num_experts=8) as proxy:
        proxy.corrupt("zeros")  # every reply of /generate from now on
        ask(proxy.url)
        assert proxy.corrupted["zeros"]

Replies of other paths, and after `honest()` all, pass through as they are.
"""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

ANSWER_S = 120.0
"""Longest wait for the server's own reply."""
_HOP = {"content-length", "transfer-encoding", "connection", "host", "content-encoding", "accept-encoding"}


class Asked(NamedTuple):
    """A request with what a corruption needs to know: its JSON body and the model's number of experts."""

    body: dict[str, Any]
    num_experts: int


def _with_rows(change: Callable[[NDArray[np.int32], int, int], NDArray[np.int32]]) -> Callable[..., None]:
    """A corruption of routes [rows, planes * k]; `change` also gets the number of prompt rows and of experts."""

    def corrupt(reply: dict[str, Any], asked: Asked) -> None:
        meta = reply["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            return
        start = asked.body.get("routed_experts_start_len") or 0
        rows = meta["prompt_tokens"] + meta["completion_tokens"] - 1 - start
        ids = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4").reshape(rows, -1).copy()
        changed = change(ids, max(0, meta["prompt_tokens"] - start), asked.num_experts)
        meta["routed_experts"] = base64.b64encode(changed.astype("<i4").tobytes()).decode()

    return corrupt


def _repeat_first_answer_row(ids: NDArray[np.int32], prompt: int, experts: int) -> NDArray[np.int32]:
    ids[prompt - 1 :] = ids[prompt - 1]
    return ids


def _set_one(value: Callable[[int], int]) -> Callable[[NDArray[np.int32], int, int], NDArray[np.int32]]:
    def change(ids: NDArray[np.int32], prompt: int, experts: int) -> NDArray[np.int32]:
        ids[-1, -1] = value(experts)
        return ids

    return change


def _other_rows_for_the_prompt(ids: NDArray[np.int32], prompt: int, experts: int) -> NDArray[np.int32]:
    """Valid rows, but of other experts: what a cache slot held before."""
    ids[: prompt - 1] = (ids[: prompt - 1] + 1) % experts
    return ids


def _stale_prefix(reply: dict[str, Any], asked: Asked) -> None:
    if reply["meta_info"].get("cached_tokens"):
        _with_rows(_other_rows_for_the_prompt)(reply, asked)


def _with_logprobs(change: Callable[[list[list[Any]]], list[list[Any]]]) -> Callable[..., None]:
    """A corruption of output_token_logprobs, a list of [log-prob, token id, text]."""

    def corrupt(reply: dict[str, Any], asked: Asked) -> None:
        meta = reply["meta_info"]
        meta["output_token_logprobs"] = change(meta["output_token_logprobs"])

    return corrupt


def _shifted(rows: list[list[Any]]) -> list[list[Any]]:
    """Each log-prob stands at another token. Where all tokens are the same one (or there is one), of another token."""
    shifted = rows[1:] + rows[:1]
    if [row[1] for row in shifted] == [row[1] for row in rows]:
        return [[row[0], row[1] + 1, *row[2:]] for row in rows]
    return shifted


def _third(value: Any) -> Callable[[list[list[Any]]], list[list[Any]]]:
    return lambda rows: [[value, *row[1:]] if i == min(2, len(rows) - 1) else row for i, row in enumerate(rows)]


def _without(*keys: str) -> Callable[..., None]:
    def corrupt(reply: dict[str, Any], asked: Asked) -> None:
        for key in keys:
            reply.pop(key, None)
            reply["meta_info"].pop(key, None)

    return corrupt


def _another_label(reply: dict[str, Any], asked: Asked) -> None:
    for span in reply["meta_info"]["weight_versions"]:
        span["version"] = "somebody-elses"
    reply["meta_info"]["weight_version"] = "somebody-elses"


def _gap_in_versions(reply: dict[str, Any], asked: Asked) -> None:
    reply["meta_info"]["weight_versions"][0]["start"] += 1


def _stop_token_cut(reply: dict[str, Any], asked: Asked) -> None:
    if reply["meta_info"]["finish_reason"]["type"] == "stop":
        reply["output_ids"].pop()


def _cut_short(reply: dict[str, Any], asked: Asked) -> None:
    """A server with a limit of its own on max_new_tokens: one token less, everything else in order."""
    meta = reply["meta_info"]
    if meta["finish_reason"]["type"] == "abort":
        return
    _with_rows(lambda ids, prompt, experts: ids[:-1])(reply, asked)
    reply["output_ids"].pop()
    meta["output_token_logprobs"].pop()
    meta["weight_versions"][-1]["end"] -= 1
    meta["completion_tokens"] -= 1
    meta["finish_reason"] = {"type": "length", "length": meta["completion_tokens"]}


REPLIES: dict[str, Callable[[dict[str, Any], Asked], None]] = {
    "zeros": _with_rows(lambda ids, prompt, experts: np.zeros_like(ids)),
    "repeated_row": _with_rows(_repeat_first_answer_row),
    "row_too_many": _with_rows(lambda ids, prompt, experts: np.concatenate((ids, ids[-1:]))),
    "row_missing": _with_rows(lambda ids, prompt, experts: ids[:-1]),
    "id_too_large": _with_rows(_set_one(lambda experts: experts)),
    "negative_id": _with_rows(_set_one(lambda experts: -1)),
    "no_routes_field": _without("routed_experts"),
    "stale_prefix": _stale_prefix,
    "nan_logprobs": _with_logprobs(_third(float("nan"))),
    "null_logprobs": _with_logprobs(_third(None)),
    "positive_logprobs": _with_logprobs(_third(0.5)),
    "logprob_missing": _with_logprobs(lambda rows: rows[:-1]),
    "logprobs_shifted": _with_logprobs(_shifted),
    "no_logprobs": _without("output_token_logprobs"),
    "no_output_ids": _without("output_ids"),
    "no_weight_versions": _without("weight_versions", "weight_version"),
    "swapped_version": _another_label,
    "version_gap": _gap_in_versions,
    "stop_token_cut": _stop_token_cut,
    "cut_short": _cut_short,
    "no_routes_flag": lambda reply, asked: reply.update(enable_return_routed_experts=False),
}
"""Corruptions of a reply of /generate, the last one of /server_info, by name."""

REQUESTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "ignores_temperature": lambda body: body["sampling_params"].update(temperature=1.0),
    "ignores_start_len": lambda body: body.pop("routed_experts_start_len", None),
    "ignores_stop_tokens": lambda body: body["sampling_params"].update(stop_token_ids=[], ignore_eos=True),
    "ignores_cache_key": lambda body: body.update(extra_key="one for all"),
    "ignores_abort": lambda body: body.update(rid="nobody", abort_all=False),
}
"""Corruptions of a request on its way in, by name."""

CONNECTIONS = ("http_500", "no_json", "hang", "cut_connection", "success_false", "refused", "ignored")
"""Corruptions of any path. success_false: the server did it and says no. refused: 400 without asking the server.
ignored: success without asking the server. hang: no answer until the proxy closes. cut_connection: half a reply."""


class _Plan(NamedTuple):
    name: str
    path: str
    times: int | None


class CorruptingProxy:
    """Forwards to `upstream` from a thread of its own, on a free port of the loopback.

    corrupted counts what was corrupted by name, asked holds every (path, body) that came.
    """

    def __init__(self, upstream: str, num_experts: int = 0) -> None:
        self.upstream, self.num_experts = upstream.rstrip("/"), num_experts
        self.corrupted: Counter[str] = Counter()
        self.asked: list[tuple[str, Any]] = []
        self.url = ""
        self._plans: list[_Plan] = []
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> CorruptingProxy:
        self._thread.start()
        assert self._ready.wait(30), "the proxy did not start within 30 s"
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        assert self._loop is not None and self._ended is not None
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(30)
        assert not self._thread.is_alive(), "the proxy did not end within 30 s"

    def corrupt(self, name: str, path: str = "/generate", times: int | None = None) -> None:
        """Corrupt the replies of path by name from now on, or the next `times` ones."""
        assert name in REPLIES or name in REQUESTS or name in CONNECTIONS, name
        with self._lock:
            self._plans.append(_Plan(name, path, times))

    def honest(self) -> None:
        """Pass everything through again."""
        with self._lock:
            self._plans.clear()

    def _next(self, path: str) -> str | None:
        with self._lock:
            for i, plan in enumerate(self._plans):
                if plan.path == path:
                    if plan.times is not None:
                        left = plan._replace(times=plan.times - 1)
                        self._plans[i : i + 1] = [left] if left.times else []
                    return plan.name
        return None

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0), auto_decompress=True
        ) as self._session:
            runner = web.AppRunner(app, shutdown_timeout=1.0)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            self._ready.set()
            await self._ended.wait()
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        data, path = await request.read(), request.path
        body = json.loads(data) if data else None
        self.asked.append((path, body))
        name = self._next(path)
        if name in REQUESTS:
            REQUESTS[name](body)
            data = json.dumps(body).encode()
            self.corrupted[name] += 1
        early = await self._without_asking(name)
        if early is not None:
            return early
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP}
        try:
            url = self.upstream + request.path_qs
            async with self._session.request(request.method, url, data=data, headers=headers) as answer:
                status, reply, kind = answer.status, await answer.read(), answer.content_type
        except (aiohttp.ClientError, TimeoutError) as exc:
            return web.Response(status=502, text=f"the server behind the proxy: {exc!r}")
        if name == "cut_connection":
            return await self._cut(request, reply)
        if name == "success_false":
            self.corrupted[name] += 1
            return web.json_response({"success": False, "message": "corrupted by the proxy"}, status=400)
        if name in REPLIES and status == 200:
            reply = self._changed(name, reply, Asked(body, self.num_experts))
        return web.Response(status=status, body=reply, content_type=kind)

    async def _without_asking(self, name: str | None) -> web.Response | None:
        """What is answered without the server's help, None when it has to be asked."""
        answers = {
            "http_500": web.Response(status=500, text="Internal Server Error"),
            "no_json": web.Response(text="<html>maintenance</html>", content_type="text/html"),
            "refused": web.json_response({"success": False, "message": "refused by the proxy"}, status=400),
            "ignored": web.json_response({"success": True, "message": ""}),
        }
        if name == "hang":
            assert self._ended is not None
            self.corrupted[name] += 1
            await self._ended.wait()
        if name in answers:
            self.corrupted[name] += 1
        return answers.get(name or "")

    async def _cut(self, request: web.Request, reply: bytes) -> web.StreamResponse:
        self.corrupted["cut_connection"] += 1
        half = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(reply))})
        await half.prepare(request)
        await half.write(reply[: len(reply) // 2])
        if request.transport is not None:
            request.transport.abort()
        return half

    def _changed(self, name: str, reply: bytes, asked: Asked) -> bytes:
        answers = json.loads(reply)
        for answer in answers if isinstance(answers, list) else [answers]:
            REPLIES[name](answer, asked)
        self.corrupted[name] += 1
        return json.dumps(answers).encode()
