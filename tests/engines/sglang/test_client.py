"""HTTP to one server: what is sent, and what each failure is called."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from asyncrl.engines.sglang.client import Client, Refused, Unreachable
from asyncrl.errors import ConfigError, EngineError
from tests.helpers.fake_sglang import FakeSglang


def run(job: Callable[[FakeSglang, Client], Awaitable[None]], **options: Any) -> None:
    """Run a job against a fake server and a client of it, at most 30 s."""

    async def main() -> None:
        async with asyncio.timeout(30), FakeSglang() as fake:
            client = Client(fake.url, **options)
            try:
                await job(fake, client)
            finally:
                await client.close()

    asyncio.run(main())


def answering(response: Callable[[], web.StreamResponse]) -> Callable[..., Awaitable[web.StreamResponse]]:
    async def handler(request: web.Request, body: Any) -> web.StreamResponse:
        return response()

    return handler


def test_json_goes_out_and_comes_back():
    async def job(fake, client):
        fake.handlers["/x"] = answering(lambda: web.json_response({"a": [1, None]}))
        assert await client.post("/x", {"b": 2}) == {"a": [1, None]}
        assert await client.get("/x") == {"a": [1, None]}
        assert [call.body for call in fake.of("/x")] == [{"b": 2}, None]

    run(job)


def test_empty_and_text_answers_are_no_errors():
    async def job(fake, client):
        assert await client.post("/abort_request", {"rid": "r"}) is None
        assert await client.get("/health_generate") == {}
        for words in ({"text": "Cache flushed.\n"}, {"body": b"Cache flushed.\n"}):
            fake.handlers["/flush_cache"] = answering(lambda words=words: web.Response(**words))
            assert await client.post("/flush_cache", {}) == "Cache flushed.\n"

    run(job)


@pytest.mark.parametrize(
    ("keys", "sent"),
    [
        ({}, [None, None, None]),
        ({"api_key": "a"}, ["a", "a", "a"]),
        ({"admin_key": "m"}, [None, None, "m"]),
        ({"api_key": "a", "admin_key": "m"}, ["a", "a", "m"]),
    ],
)
def test_each_call_carries_its_key(keys, sent):
    async def job(fake, client):
        await client.get("/model_info")
        await client.post("/generate_nothing", {})
        await client.post("/pause_generation", {}, admin=True)
        assert [call.key for call in fake.calls] == sent

    run(job, **keys)


@pytest.mark.parametrize(
    ("response", "status", "message"),
    [
        (lambda: web.json_response({"error": {"message": "too long"}}, status=400), 400, "too long"),
        (lambda: web.json_response({"success": False, "message": "no session"}, status=400), 400, "no session"),
        (lambda: web.json_response({"success": False, "message": "no session"}), 200, "no session"),
        (lambda: web.json_response({"detail": [{"loc": ["body"]}]}, status=422), 422, "[{'loc': ['body']}]"),
        (lambda: web.Response(status=503), 503, ""),
        (lambda: web.Response(status=500, text="Internal Server Error"), 500, "Internal Server Error"),
        (lambda: web.Response(status=307, headers={"Location": "http://elsewhere.invalid/"}), 307, ""),
    ],
)
def test_refusals_keep_status_and_message(response, status, message):
    async def job(fake, client):
        fake.handlers["/x"] = answering(response)
        with pytest.raises(Refused, match=rf"POST http://127.0.0.1:\d+/x was refused with {status}") as caught:
            await client.post("/x", {})
        assert (caught.value.status, caught.value.message) == (status, message)
        assert len(fake.calls) == 1

    run(job)


def test_silence_ends_after_the_time_that_the_call_names():
    async def job(fake, client):
        async def silent(request, body):
            await asyncio.sleep(30)
            raise AssertionError

        fake.handlers["/x"] = silent
        with pytest.raises(Unreachable, match=r"GET http://127.0.0.1:\d+/x gave no answer within 0\.2 s"):
            await client.get("/x", 0.2)
        with pytest.raises(Unreachable, match=r"POST http://127.0.0.1:\d+/x gave no answer within 0\.3 s"):
            await client.post("/x", {})

    run(job, answer_s=0.3)


def test_a_call_without_end_waits_longer_than_the_answer_time():
    async def job(fake, client):
        async def slow(request, body):
            await asyncio.sleep(0.6)
            return web.json_response({})

        fake.handlers["/x"] = slow
        assert await client.post("/x", {}, math.inf) == {}

    run(job, answer_s=0.2)


def test_nobody_listens():
    async def main() -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            client = Client(f"http://127.0.0.1:{free.getsockname()[1]}")
            with pytest.raises(Unreachable, match=r"GET http://127.0.0.1:\d+/model_info failed.*Connect call failed"):
                await client.get("/model_info")
            await client.close()

    asyncio.run(main())


def test_a_lost_connection():
    async def job(fake, client):
        async def drops(request, body):
            request.transport.abort()
            return web.Response()

        fake.handlers["/x"] = drops
        with pytest.raises(Unreachable, match=r"POST http://127.0.0.1:\d+/x failed, waiting for its answer: \w+"):
            await client.post("/x", {})

    run(job)


@pytest.mark.parametrize(
    "response",
    [
        lambda: web.Response(text="<html>login</html>", content_type="text/html"),
        lambda: web.Response(body=b'{"output_ids": [1', content_type="application/json"),
    ],
)
def test_an_answer_that_is_not_json(response):
    async def job(fake, client):
        fake.handlers["/x"] = answering(response)
        with pytest.raises(Unreachable, match=r"/x answered 200 with .* that is not JSON"):
            await client.post("/x", {})

    run(job)


def test_a_get_answers_an_object():
    async def job(fake, client):
        fake.handlers["/x"] = answering(lambda: web.json_response([1]))
        with pytest.raises(Unreachable, match="/x answered list, not an object"):
            await client.get("/x")

    run(job)


def test_keys_are_in_no_text():
    async def job(fake, client):
        fake.handlers["/x"] = answering(lambda: web.json_response({"message": "bad key sesame, or master"}, status=401))
        with pytest.raises(Refused) as caught:
            await client.post("/x", {}, admin=True)
        texts = f"{caught.value} {caught.value.message} {client!r} {client}"
        assert "sesame" not in texts and "master" not in texts and "bad key ***, or ***" in texts

    run(job, api_key="sesame", admin_key="master")


def test_proxies_of_the_environment_are_not_asked(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    async def job(fake, client):
        assert await client.get("/model_info") == {"success": True, "message": ""}

    run(job)


def test_many_calls_run_at_a_time():
    async def job(fake, client):
        fake.hold = True
        body = {"rid": "", "input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
        calls = [asyncio.ensure_future(client.post("/generate", body | {"rid": str(i)})) for i in range(200)]
        await fake.until(lambda: len(fake.running) == 200)
        fake.finish()
        assert len(await asyncio.gather(*calls)) == 200

    run(job)


def test_one_client_serves_several_loops():
    async def job(fake, client):
        async def other() -> None:
            assert await client.get("/model_info")
            await client.close()

        thread = threading.Thread(target=lambda: asyncio.run(other()))
        assert await client.get("/model_info")
        thread.start()
        await asyncio.to_thread(thread.join, 10)
        assert await client.get("/model_info")
        assert len(fake.calls) == 3

    run(job)


def test_a_call_after_the_end_opens_nothing():
    """Like the last abort of an engine that is closed: nobody would close its connection."""

    async def job(fake, client):
        fake.handlers["/x"] = answering(lambda: web.json_response({}))
        await client.get("/x")
        await client.close()
        with pytest.raises(Unreachable, match="the connections of this event loop are closed"):
            await client.get("/x")
        assert len(fake.of("/x")) == 1 and not client._sessions

    run(job)


@pytest.mark.parametrize("url", ["http://h:1", "https://h", "http://h:1/", "http://[::1]:30000"])
def test_urls_of_servers(url):
    assert Client(url).url == url.rstrip("/")


@pytest.mark.parametrize(
    "url",
    [
        "", "h:1", "localhost", "ftp://h:1", "tcp://h:1", "http://", "http://:1", "http://h:0", "http://h:x",
        "http://h:99999", "http://h:1/v1", "http://h:1?a=b", "http://h:1#a",
    ],
)  # fmt: skip
def test_urls_that_are_none(url):
    with pytest.raises(ConfigError, match=r"expected http://HOST:PORT"):
        Client(url)


def test_a_password_in_an_url_is_refused_and_not_shown():
    with pytest.raises(ConfigError) as caught:
        Client("http://user:secret@h:1")
    assert "secret" not in str(caught.value)


def test_errors_are_engine_errors():
    assert issubclass(Refused, EngineError) and issubclass(Unreachable, EngineError)
