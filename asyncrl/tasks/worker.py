"""One reward worker process: `python -m asyncrl.tasks.worker FD PARENT_PID SCORER BYTES REWARD`.

SCORER is `module:function` of the verifiers, BYTES the address space (0: no limit), REWARD task.reward or "". First
frame to the pool: {"ready", "groups"} or {"failed": reason}. Then it answers ["prepare", name] with one frame and
["score" | "group", items] with one frame per item, in order, so that the pool can time every call by itself. Code is
named by the command line alone. Imports the standard library and the verifiers only.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any

from asyncrl.errors import TaskError
from asyncrl.parent import serve_only
from asyncrl.tasks.processes import encode, limit_memory
from asyncrl.tasks.rewards import USER
from asyncrl.tasks.rewards.base import Verdict
from asyncrl.tasks.user_reward import Asked, UserReward

LENGTH = struct.Struct("<I")

Reply = dict[str, Any]


def main(argv: list[str]) -> int:
    """Serve until the pool closes its end or dies. Returns the exit status."""
    fd, parent, scorer, memory_bytes, reward = int(argv[1]), int(argv[2]), argv[3], int(argv[4]), argv[5]
    # Where the kernel does not see to it, only an idle worker notices the end of the pool, by its socket.
    serve_only(parent)
    if memory_bytes:
        limit_memory(memory_bytes)
    with socket.socket(fileno=fd) as sock:
        try:
            server = _Server(scorer, reward)
        except (Exception, SystemExit) as exc:  # importing runs foreign code
            why = str(exc) if isinstance(exc, TaskError) else f"{type(exc).__name__}: {str(exc)[:500]}"
            sock.sendall(encode({"failed": why}))
            return 1
        sock.sendall(encode({"ready": os.getpid(), "groups": server.takes_groups}))
        # Waits for the next message; unblocked by the pool closing its end (also when it is killed).
        while (message := _receive(sock)) is not None:
            for reply in server.answer(*message):
                sock.sendall(encode(reply))
                if reply.get("leave"):
                    return 0
    return 0


class _Server:
    """The verifiers and the user's reward of this process."""

    def __init__(self, scorer: str, reward: str) -> None:
        module_name, _, function = scorer.partition(":")
        module = importlib.import_module(module_name)
        self._score: Callable[[str, str | None, str], float | Verdict] = getattr(module, function)
        self._prepare: Callable[[str], None] | None = getattr(module, "prepare", None)
        self._user = UserReward(reward) if reward else None

    @property
    def takes_groups(self) -> bool:
        return self._user is not None and self._user.takes_groups

    def answer(self, call: str, what: Any) -> Iterator[Reply]:
        """One reply per item, each as soon as it is known."""
        if call == "prepare":
            yield _reply(lambda: self._prepare and self._prepare(what))
        elif call == "group":
            yield from self._group(what)
        else:
            for source, text, answer, *rest in what:
                yield _reply(lambda s=source, t=text, a=answer, r=rest: self._one(s, t, a, *r))  # type: ignore[misc]

    def _one(self, source: str, text: str | None, answer: str, *rest: str) -> float | Verdict:
        if source != USER:
            return self._score(source, text, answer)
        if self._user is None:
            raise TaskError("the worker was started without a task.reward")
        return self._user.score(text or "", Asked(answer, *rest))

    def _group(self, items: list[list[Any]]) -> Iterator[Reply]:
        if self._user is None:
            raise TaskError("the worker was started without a task.reward")
        _, _, answer, *rest = items[0]
        results: list[Verdict | TaskError] = []
        texts = [item[1] or "" for item in items]
        failed = _reply(lambda: results.extend(self._user.score_group(texts, Asked(answer, *rest))))  # type: ignore[union-attr]
        if "error" in failed:
            leave = failed.pop("leave", False)
            yield from ({**failed, "leave": leave and i == len(items) - 1} for i in range(len(items)))
        for result in results:
            yield {"error": str(result)} if isinstance(result, TaskError) else _of_verdict(result)


def _reply(call: Callable[[], Any]) -> Reply:
    try:
        result = call()
        return _of_verdict(result) if isinstance(result, Verdict) else {"reward": float(result or 0.0)}
    except MemoryError as exc:  # what it holds is known to nobody: the process ends, and its memory with it
        return {"error": f"MemoryError: {str(exc)[:500]}", "leave": True}
    except TimeoutError as exc:
        return {"error": f"TimeoutError: {str(exc)[:500]}", "timed_out": True}
    except (Exception, SystemExit) as exc:  # verifiers are foreign code; the pool counts it and never sees a 0
        return {"error": f"{type(exc).__name__}: {str(exc)[:500]}"}


def _of_verdict(verdict: Verdict) -> Reply:
    reply: Reply = {"reward": float(verdict.reward)}
    if verdict.parts:
        reply["parts"] = {name: float(value) for name, value in verdict.parts.items()}
    if verdict.extracted:
        reply["extracted"] = verdict.extracted
    return reply


def _receive(sock: socket.socket) -> Any:
    head = _read(sock, LENGTH.size)
    if head is None:
        return None
    body = _read(sock, LENGTH.unpack(head)[0])
    return None if body is None else json.loads(body)


def _read(sock: socket.socket, count: int) -> bytes | None:
    """Exactly `count` bytes, or None when the pool closed its end."""
    data = bytearray()
    while len(data) < count:
        try:
            part = sock.recv(min(count - len(data), 2**20))
        except ConnectionError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
