"""What an engine counts. Knows no request."""

from __future__ import annotations

import time

from asyncrl.types import Completion


class Tally:
    """Counters since start; read from any thread, written by one."""

    def __init__(self) -> None:
        self.running = self.waiting = 0
        self._counts = dict.fromkeys(
            (
                "tokens", "prompt_tokens", "loads", "load_s", "retractions", "cached_tokens", "resampled",
                "stale_prefix", "unsure_tokens",
            ),
            0.0,
        )  # fmt: skip
        self._busy_s, self._since = 0.0, 0.0

    def add(self, name: str, amount: float = 1.0) -> None:
        """Count."""
        self._counts[name] += amount

    def sample(self, num_prompt: int, done: Completion) -> None:
        """Count a sample: its tokens, and those of its prompt that were not in the server's cache."""
        self.add("tokens", len(done.token_ids))
        self.add("prompt_tokens", max(0.0, num_prompt - done.extra["cached_tokens"]))
        self.add("cached_tokens", done.extra["cached_tokens"])
        self.add("retractions", done.extra["num_retractions"])
        if done.sampled is not None:
            self.add("unsure_tokens", float((~done.sampled).sum()))

    def busy(self, now_busy: bool) -> None:
        """From now on the server samples, or it does not."""
        now = time.perf_counter()
        if self._since:
            self._busy_s += now - self._since
        self._since = now if now_busy else 0.0

    def stats(self) -> dict[str, float]:
        """Counters and gauges of `asyncrl.engines.base.Engine.stats`. steps is 0: the server does not say."""
        since, busy_s = self._since, self._busy_s
        if since:
            busy_s += time.perf_counter() - since
        gauges = {"running": float(self.running), "waiting": float(self.waiting)}
        return self._counts | gauges | {"busy_s": busy_s, "steps": 0.0}
