"""One environment process: `python -m asyncrl.tasks.environments.worker FD PARENT_PID MODULE:CLASS BYTES`.

First frame to the pool: {"asynchronous": bool} or {"failed": reason}. Then it answers {"id", "call": open | step |
close, "episode", ...} with {"id", "step": [...]} or {"id", "error"}. The class is the one of the command line: what
comes over the socket names none. Imports the standard library and the user's module only.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import socket
import sys
from typing import Any

from asyncrl.parent import serve_only
from asyncrl.tasks.environments.step import step_of
from asyncrl.tasks.processes import Channel, encode, limit_memory
from asyncrl.tasks.words import memory_hint

CONTEXT = ("prompt", "answer", "extra")
"""What an environment is made of."""


def main(argv: list[str]) -> int:
    """Serve until the pool closes its end or dies. Returns the exit status."""
    fd, parent, name, memory_bytes = int(argv[1]), int(argv[2]), argv[3], int(argv[4])
    # Where the kernel does not see to it, only an idle worker notices the end of the pool, by its socket.
    serve_only(parent)
    limit_memory(memory_bytes)
    with socket.socket(fileno=fd) as sock:
        found, reason = _find(name)
        sock.sendall(encode({"failed": reason} if found is None else {"asynchronous": _is_asynchronous(found)}))
        if found is None:
            return 1
        asyncio.run(_Server(found, sock).serve())
    return 0


def _find(name: str) -> tuple[type[Any] | None, str]:
    """The class, or None and why not."""
    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as exc:  # importing runs foreign code
        return None, f"importing {module_name!r} failed with {type(exc).__name__}: {str(exc)[:500]}{memory_hint(exc)}"
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        return None, f"{module_name!r} has no class {class_name!r}"
    if not callable(getattr(found, "step", None)):
        return None, f"class {class_name!r} has no method step(text)"
    return (found, "") if _way(found) else (None, f"class {class_name!r} {_cannot_be_made(found)}")


def _way(made: type[Any]) -> str:
    """How the class takes prompt, answer and extra: `name`, `position`, or "" for neither."""
    try:
        signature = inspect.signature(made)
    except (TypeError, ValueError):  # of a class that is not written in Python
        return "position"
    for way in ("name", "position"):
        try:
            signature.bind(*(CONTEXT if way == "position" else ()), **dict.fromkeys(CONTEXT if way == "name" else ()))
        except TypeError:
            continue
        return way
    return ""


def _cannot_be_made(found: type[Any]) -> str:
    return (
        f"takes {inspect.signature(found)}, and is called with {', '.join(CONTEXT)}, by name or else by position; "
        "declare __init__(self, prompt, answer, extra)"
    )


def _is_asynchronous(found: type[Any]) -> bool:
    return inspect.iscoroutinefunction(found.step)


class _Server:
    """The episodes of this process. An asynchronous environment has several calls running at a time."""

    def __init__(self, made: type[Any], sock: socket.socket) -> None:
        self._class, self._way, self._channel = made, _way(made), Channel(sock)
        self._episodes: dict[int, Any] = {}
        self._sending = asyncio.Lock()

    async def serve(self) -> None:
        """Until the pool closes its end; waits for its next call."""
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                task = asyncio.create_task(self._answer(await self._channel.receive()))
                running.add(task)
                task.add_done_callback(running.discard)
        except ConnectionError:
            return

    async def _answer(self, message: dict[str, Any]) -> None:
        try:
            reply = await self._call(message)
        except (Exception, SystemExit) as exc:  # foreign code; the pool counts it and never sees a reward of 0
            reply = {"error": f"{type(exc).__name__}: {str(exc)[:500]}"}
        async with self._sending:
            await self._channel.send({"id": message["id"], **reply})

    async def _call(self, message: dict[str, Any]) -> dict[str, Any]:
        episode = message["episode"]
        if message["call"] == "open":
            extra = json.loads(message["extra"]) if message["extra"] else {}
            if not isinstance(extra, dict):
                raise ValueError(f"the extra of the prompt is {type(extra).__name__}, expected a JSON object")
            given = dict(zip(CONTEXT, (message["prompt"], message["answer"], extra), strict=True))
            by_name = self._way == "name"
            self._episodes[episode] = self._class(**given) if by_name else self._class(*given.values())
            return {}
        if message["call"] == "close":
            environment = self._episodes.pop(episode, None)
            if (close := getattr(environment, "close", None)) is not None:
                await _settled(close())
            return {}
        step = step_of(await _settled(self._episodes[episode].step(message["text"])))
        return {"step": [step.observation, step.done, step.reward, dict(step.parts)]}


async def _settled(value: Any) -> Any:
    """What the user's method returned, awaited where it is to be."""
    return await value if inspect.isawaitable(value) else value


if __name__ == "__main__":
    sys.exit(main(sys.argv))
