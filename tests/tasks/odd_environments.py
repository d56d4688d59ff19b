"""Environments for the pool's tests: each misbehaves in its own way, as the text of the turn says."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

from asyncrl.tasks.environments import Step


class Odd:
    """Does what the text says; counts its steps."""

    def __init__(self, prompt: str, answer: str, extra: dict[str, Any]) -> None:
        if prompt == "bad":
            raise RuntimeError("no such prompt")
        self.prompt, self.answer, self.extra, self.steps = prompt, answer, extra, 0

    def step(self, text: str) -> Any:
        self.steps += 1
        match text.split():
            case ["hang"]:
                time.sleep(3600)
            case ["die"]:
                os._exit(7)
            case ["raise"]:
                raise ValueError("as told")
            case ["exit"]:
                sys.exit(3)
            case ["print"]:
                print('{"id": 1, "step": [null, true, 9.0, {}]}', flush=True)
                os.write(1, b"\x04\x00\x00\x00null")
                sys.stderr.write("noise\n")
                return Step("printed")
            case ["memory"]:
                return len(bytearray(2**33))
            case ["tuple"]:
                return ("seen", False, 0.5)
            case ["dict"]:
                return {"observation": None, "reward": 1, "parts": {"a": 2}}
            case ["nan"]:
                return Step("x", reward=float("nan"))
            case ["unknown"]:
                return {"obs": "x"}
            case ["none"]:
                return None
            case ["many"]:
                return Step("x", parts={f"p{i}": 1.0 for i in range(40)})
            case ["who"]:
                return Step(f"{self.prompt}|{self.answer}|{sorted(self.extra.items())}|{self.steps}|{os.getpid()}")
        return Step(text, reward=1.0)


class NoConstructor:
    """Has none of its own, so it takes nothing."""

    def step(self, text: str) -> Step:
        return Step(text)


class TakesMore:
    """Wants what nothing gives."""

    def __init__(self, prompt: str, answer: str, extra: dict[str, Any], budget: int) -> None:
        raise AssertionError

    def step(self, text: str) -> Step:
        return Step(text)


class OtherOrder:
    """Names what it takes, in an order of its own."""

    def __init__(self, *, extra: dict[str, Any], answer: str, prompt: str, budget: int = 3) -> None:
        self.said = f"{prompt}|{answer}|{extra}|{budget}"

    def step(self, text: str) -> Step:
        return Step(self.said)


class OtherNames:
    """Takes them by position."""

    def __init__(self, question: str, gold: str, row: dict[str, Any]) -> None:
        self.said = f"{question}|{gold}|{row}"

    def step(self, text: str) -> Step:
        return Step(self.said)


class Waiting:
    """Asynchronous: a step ends when another episode has come to its own."""

    here = 0

    def __init__(self, prompt: str, answer: str, extra: dict[str, Any]) -> None:
        self.prompt = prompt

    async def step(self, text: str) -> Step:
        if text == "hang":
            await asyncio.sleep(3600)
        Waiting.here += 1
        while Waiting.here < 3:
            await asyncio.sleep(0.01)
        return Step("together", done=True)


class Closing:
    """Its close() leaves a file; a file's name is the prompt."""

    def __init__(self, prompt: str, answer: str, extra: dict[str, Any]) -> None:
        self.prompt = prompt

    def step(self, text: str) -> Step:
        return Step(text)

    async def close(self) -> None:
        with open(self.prompt, "w") as file:
            file.write("closed")


class NoStep:
    """Is no environment."""


def function(text: str) -> None:
    """Is no class."""
