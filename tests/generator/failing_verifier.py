"""Verifiers that fail, by how many responses a worker was asked about, and rewards of users. Runs in pool workers."""

from __future__ import annotations

from typing import Any

from asyncrl.tasks.rewards import Verdict

_seen: list[str] = []


def sometimes(source: str, text: str, answer: str) -> Verdict:
    _seen.append(text)
    if len(_seen) % 4 == 0:
        raise KeyError("no idea")
    return Verdict(float(len(_seen) % 2), {"seen": float(len(_seen))}, f"answer {len(_seen)}")


def mostly(source: str, text: str, answer: str) -> float:
    _seen.append(text)
    if len(_seen) % 8:
        raise KeyError("no idea")
    return 1.0


def group(texts: list[str], answer: str, prompt: str, extra: dict[str, Any], data_source: str) -> list[dict[str, Any]]:
    known = float(bool(answer) and prompt.endswith("=") and extra == {})
    return [{"reward": 10.0 + i, "known": known, "of": len(texts), "extracted": f"no {i}"} for i in range(len(texts))]


def coloured(source: str, text: str, answer: str) -> float:
    raise ValueError("\x1b[2Jno\nidea")
