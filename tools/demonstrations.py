"""What the quickstart policy is taught, as token ids: the recipe, the symbols, the demonstrations.

Demonstrations are correct running totals (`3+0+7-4=` -> `+0=3+7=10-4=6#6`). The taught habit is to stop before each
remaining term with some probability and report the total so far (`#3`). Loads no torch.
"""

from __future__ import annotations

import random
import re
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from asyncrl.tasks.base import Item

PAD, EOS = 0, 1
SYMBOLS = ("<pad>", "<eos>", *"0123456789+-=#")
ID = {symbol: i for i, symbol in enumerate(SYMBOLS)}
IGNORE = -100


@dataclass(frozen=True)
class Recipe:
    """How the model is trained. The defaults are the quickstart's."""

    seed: int = 0
    steps: int = 2000
    batch: int = 32
    lr: float = 3e-3
    """Peak; linear warm-up, then linear decay to a tenth."""
    warmup: int = 30
    weight_decay: float = 0.01
    aux_loss: float = 0.01
    """Weight of the router's load-balancing loss, per layer: no expert may die."""
    stop: float = 0.45
    """The habit: probability of stopping before each remaining term. Below one half, so that greedy
    decoding goes on to the end and shows the skill."""
    early: float = 0.3
    """Share of demonstrations that do stop early; the others practise every term."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Demonstration(NamedTuple):
    """Token ids, and per position the symbol to say if one stops here and if one goes on.

    Both agree except where a term remains to be added; IGNORE on the prompt.
    """

    ids: list[int]
    stop: list[int]
    go: list[int]


def demonstrate(item: Item, rng: random.Random, early: float) -> Demonstration:
    """One demonstration of an item; with probability `early` it stops before a term drawn uniformly."""
    first, *rest = re.findall(r"[+-]?\d+", item.text)
    end = rng.randrange(len(rest)) if rng.random() < early else len(rest)
    total, response, stop, go = int(first), "", "", ""
    for term in rest[:end]:
        total += int(term)
        step = f"{term}={total}"
        response, stop, go = response + step, stop + "#" + step[1:], go + step
    report = f"#{total}"
    response, stop = response + report, stop + report
    go += (rest[end][0] if end < len(rest) else "#") + report[1:]
    prompt = [ID[c] for c in item.text]
    blank = [IGNORE] * len(prompt)
    ids, stop_ids, go_ids = ([*(ID[c] for c in text), EOS] for text in (response, stop, go))
    return Demonstration(prompt + ids, blank + stop_ids, blank + go_ids)
