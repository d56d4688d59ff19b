"""The learning rate of every update: a pure function of its number, so that there is no state to save."""

from __future__ import annotations

import math

from asyncrl.sections.training import LearnerSection


def learning_rate(update: int, s: LearnerSection) -> float:
    """Warm-up to lr over warmup_updates (update 0 has lr / warmup_updates), then as lr_schedule says.

    linear and cosine fall from lr at the first update after the warm-up towards min_lr, which they would reach at
    update s.updates, the one after the last.
    """
    if update < s.warmup_updates:
        return s.lr * min(1.0, (update + 1) / s.warmup_updates)
    if s.lr_schedule == "constant":
        return s.lr
    done = min(1.0, (update - s.warmup_updates) / max(1, s.updates - s.warmup_updates))
    left = 1.0 - done if s.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return s.min_lr + (s.lr - s.min_lr) * left
