"""A calculator that the policy may call: configs/examples/calculator.yaml.

A response with `#` ends the episode; the number after the last `#` is the answer. Any other response is a call: a sum
such as `3-4+10`, or nothing for the question itself. It is answered with `=` and the value, or with `=` alone when it
is no sum.
"""

from __future__ import annotations

import re

from asyncrl.tasks.environments import Step

SUM = re.compile(r"[+-]?\d{1,9}([+-]\d{1,9})*")
TERM = re.compile(r"[+-]?\d+")


class Calculator:
    """One episode. parts: calls, tool_errors (calls that were no sum)."""

    def __init__(self, prompt: str, answer: str, extra: dict) -> None:
        self.question, self.answer = prompt.strip("#="), answer

    def step(self, text: str) -> Step:
        """Reward 1 for the right answer, 0 for another one."""
        _, mark, given = text.rpartition("#")
        if mark:
            return Step(done=True, reward=float(given == self.answer), parts={"calls": 0.0, "tool_errors": 0.0})
        asked = text or self.question
        if SUM.fullmatch(asked) is None:
            return Step("=", parts={"calls": 1.0, "tool_errors": 1.0})
        value = sum(int(term) for term in TERM.findall(asked))
        return Step(f"={value}", parts={"calls": 1.0, "tool_errors": 0.0})
