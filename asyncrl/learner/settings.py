"""The live settings on one rank: the config by which it trains, and the newest one, by which it publishes.

Both come with the takes, so that all ranks change at the same update.
"""

from __future__ import annotations

import logging

from asyncrl import tunable
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.wire import Tuned

log = logging.getLogger(__name__)

PAUSED = "weights.paused"


class LiveSettings:
    """`config` is in force; `coming` is the newest, in force as soon as a take can be had under it."""

    def __init__(self, config: Config) -> None:
        self.base = self.config = self.coming = config
        self.seq = 0
        """Number of the newest change that is in force."""
        self._tuned, self._coming = Tuned(), Tuned()

    def take(self, tuned: Tuned, coming: Tuned) -> dict[str, tuple[str, str]] | None:
        """Follow a take. Returns old and new value (JSON) by key of what it put in force, None when nothing new is."""
        if coming != self._coming:
            self._coming, self.coming = coming, self._merged(coming, self.coming)
        if tuned == self._tuned:
            return None
        before = tunable.flat(self.config)
        self._tuned, self.seq, self.config = tuned, tuned.seq, self._merged(tuned, self.config)
        after = tunable.flat(self.config)
        return {key: (old, after[key]) for key, old in before.items() if after[key] != old}

    def _merged(self, tuned: Tuned, now: Config) -> Config:
        """The config with these values; `now` when they contradict this role's own config, which is another."""
        try:
            return tunable.merged_json(self.base, tuned.values)
        except ConfigError as exc:
            log.error(
                "change %d of the live settings is left out: this role's config contradicts it: %s", tuned.seq, exc
            )
            return now

    def scalars(self) -> dict[str, float]:
        """Metrics of rank 0: the number of the newest change in force, and the settings that people tune."""
        c, s, a = self.config, self.config.staleness, self.config.algorithm
        values = {
            "max_lag": s.max_lag,
            "sync_every": s.sync_every,
            "patience": s.patience,
            "rdc_q": a.rdc.q,
            "lr": c.learner.lr,
            "groups_in_flight": c.generator.groups_in_flight,
        }
        values |= a.clip_range
        if a.correction.kind == "tis":
            values["tis_cap"] = a.correction.cap
        return {"tune/changes": float(self.seq)} | {f"settings/{key}": float(value) for key, value in values.items()}


def is_paused(tuned: Tuned, base: Config) -> bool:
    """Whether these live settings hold publications back."""
    value = tuned.values.get(PAUSED)
    return base.weights.paused if value is None else value == "true"


def as_text(seq: int, changed: dict[str, tuple[str, str]]) -> str:
    """Changes in markdown, for the dashboard."""
    rows = [f"| `{key}` | {old} | {new} |" for key, (old, new) in changed.items()]
    return "\n".join([f"change {seq}", "", "| setting | before | now |", "| --- | --- | --- |", *rows])
