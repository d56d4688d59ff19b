"""A reward of your own: right answers, a little more for the asked form, a little less for length.

    asyncrl run configs/quickstart.yaml task.reward=examples.rewards.short_and_clear:score

Start it in the folder that holds `examples`. The function runs in the reward workers of each generator; its parts
appear in the metrics as reward/right, reward/form and reward/length. docs/verifiers.md has all that it may read and
return.
"""

from __future__ import annotations

FREE = 40
"""Characters that cost nothing."""
PER_CHARACTER = 0.001
MOST = 0.2
"""What length costs at most: less than a right answer is worth, so that a short wrong one never pays."""


def score(text: str, answer: str) -> dict[str, float | str]:
    """1 for the number after the last `#`, 0.1 for having one at all, less up to MOST for what is longer than FREE."""
    steps, mark, given = text.rpartition("#")
    right = float(bool(mark) and given.strip() == answer)
    form = 0.1 if mark and given.strip().removeprefix("-").isdigit() else 0.0
    length = -min(MOST, PER_CHARACTER * max(0, len(steps) - FREE))
    return {"reward": right + form + length, "right": right, "form": form, "length": length, "extracted": given.strip()}
