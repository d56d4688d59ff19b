"""Rewards as users write them, good and bad ones. Runs in pool workers."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

import numpy as np

RESULTS: dict[str, Any] = {
    "nan": float("nan"),
    "nan part": {"reward": 1.0, "style": float("inf")},
    "no reward": {"style": 1.0},
    "text": "1.0",
    "nothing": None,
    "text reward": {"reward": "1.0"},
    "odd name": {"reward": 1.0, "a/b": 1.0},
    "long name": {"reward": 1.0, "a" * 65: 1.0},
    "many parts": {"reward": 1.0} | {f"part{i}": 0.0 for i in range(25)},
    "extracted": {"reward": 1.0, "extracted": 7},
}


def plain(text: str) -> float:
    return 2.5 if text == "good" else -3.0


def numpy_number(text: str) -> Any:
    return np.float32(0.5)


def numpy_truth(text: str) -> Any:
    return {"reward": np.bool_(text == "good"), "close": np.asarray(0.25)}


def everything(text: str, answer: str, prompt: str, extra: dict[str, Any], data_source: str) -> dict[str, Any]:
    print("noise on the way", flush=True)
    sys.stdout.write("and more\n")
    right = text == answer and prompt == "1+1=" and extra == {"level": [1, 2]} and data_source == "mine"
    return {"reward": float(right), "length": len(text), "style.ok": True, "extracted": text.upper()}


def anything(text: str, unused: int = 3, **context: Any) -> float:
    return float(sorted(context) == ["answer", "data_source", "extra", "prompt"] and unused == 3)


async def slowly(text: str) -> float:
    await asyncio.sleep(0.01)
    return float(len(text))


async def together(texts: list[str], answer: str) -> list[Any]:
    await asyncio.gather(*(asyncio.sleep(0.01) for _ in texts))
    longest = max(map(len, texts))
    return [{"reward": len(t) / longest, "rank": float(i), "pid": os.getpid()} for i, t in enumerate(texts)]


def group(texts: list[str]) -> Any:
    if texts[0] == "short":
        return [1.0]
    if texts[0] == "hang":
        time.sleep(3600)
    if texts[0] == "raise":
        raise KeyError("the judge is ill")
    if texts[0] == "one bad":
        return [1.0, float("nan"), 0.0]
    return 7.0


def bad(text: str) -> Any:
    if text == "raise":
        raise KeyError("the judge is ill")
    if text == "hang":
        time.sleep(3600)
    return RESULTS[text]


class Judge:
    def __call__(self, text: str, answer: str) -> float:
        return float(text == answer)


judge = Judge()
constant = 3


def both(text: str, texts: list[str]) -> float:
    return 0.0


def neither(answer: str) -> float:
    return 0.0


def unknown(text: str, gold: str) -> float:
    return 0.0


def by_position(text: str, /) -> float:
    return 0.0
