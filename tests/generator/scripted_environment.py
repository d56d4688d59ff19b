"""An environment whose answers stand in the prompt's extra."""

from __future__ import annotations

import time
from typing import Any

from asyncrl.tasks.environments import Step


class Scripted:
    """extra: observations, a list whose last entry may be null; hang: the turn at which it does not answer; end: the
    turn at which it says that it is done. Reward and parts: of every step, what turn it is."""

    def __init__(self, prompt: str, answer: str, extra: dict[str, Any]) -> None:
        self.observations, self.extra, self.texts = extra["observations"], extra, list[str]()

    def step(self, text: str) -> Step:
        self.texts.append(text)
        turn = len(self.texts)
        if self.extra.get("hang") == turn:
            time.sleep(3600)
        if self.extra.get("raise") == turn:
            raise RuntimeError("told to")
        said = self.observations[turn - 1] if turn <= len(self.observations) else None
        return Step(said, self.extra.get("end") == turn, float(turn), {"steps": 1.0, "characters": float(len(text))})
