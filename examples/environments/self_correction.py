"""A second try after a hint: configs/examples/self_correction.yaml.

The number after the last `#` of a response is its answer. A wrong first answer is met with the last step of the sum:
for `1+4+9=` with `=5+9=`.
"""

from __future__ import annotations

import re

from asyncrl.tasks.environments import Step

TERM = re.compile(r"[+-]?\d+")


class SelfCorrection:
    """One episode of one or two turns. parts: first, corrected: 1 for the try that was right, else 0."""

    def __init__(self, prompt: str, answer: str, extra: dict) -> None:
        *before, last = TERM.findall(prompt)
        self.hint = f"={sum(int(term) for term in before)}{last}="
        self.answer, self.tries = answer, 0

    def step(self, text: str) -> Step:
        """Reward 1 for a right first answer, 0.5 for a right second one."""
        self.tries += 1
        _, mark, given = text.rpartition("#")
        right = bool(mark) and given == self.answer
        if not right and self.tries == 1:
            return Step(self.hint)
        first, corrected = float(right and self.tries == 1), float(right and self.tries == 2)
        return Step(done=True, reward=first + 0.5 * corrected, parts={"first": first, "corrected": corrected})
