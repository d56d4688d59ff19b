"""One lease -> one scored group (or evaluation answers). Knows the engine and the verifiers only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl import wire
from asyncrl.config import Config
from asyncrl.engines.base import Engine
from asyncrl.errors import EngineError, TaskError
from asyncrl.generator.collect import to_trajectory
from asyncrl.tasks.pool import RewardPool, Score
from asyncrl.tasks.text import Decoder
from asyncrl.types import Completion, Group, ModelInfo, Prompt, SamplingParams, Version

SAMPLING_SHARE = 0.8
"""Share of a lease after which sampling ends. What is left is for scoring and for the way to replay, where a lease
that is not answered in time is given out again: then the same prompt is sampled twice."""
SCORING_SHARE = 0.95
"""Share of a lease after which scoring ends."""


class OutOfTime(EngineError):
    """A group was not finished near the end of its lease."""


class MixedVersions(EngineError):
    """New weights came in the middle of an evaluation response, so it measures neither version."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Samples and scores leases on one engine."""

    engine: Engine
    pool: RewardPool
    decoder: Decoder
    info: ModelInfo
    config: Config
    generator_id: str
    stop_token_ids: tuple[int, ...]

    def params(self, greedy: bool = False) -> SamplingParams:
        """Sampling of training and of evaluation (the same temperature, or greedy)."""
        s = self.config.sampling
        return SamplingParams(s.temperature, s.max_new_tokens, self.stop_token_ids, greedy=greedy)

    async def group(self, lease: wire.LeaseMsg) -> Group:
        """Sample and score the group of a training lease, near the end of it: what is finished (on_timeout: partial).

        Raises EngineError, RouteError, TaskError, or OutOfTime without enough responses; the lease is then given back.
        """
        started = time.monotonic()
        prompt = wire.prompt_from_msg(lease.prompt)
        size, limit_s = self.config.algorithm.group_size, SAMPLING_SHARE * lease.deadline_s
        completions = await self.engine.generate(prompt.token_ids, size, self.params(), limit_s)
        self._enough(completions, f"of {size} responses were sampled within {limit_s:.1f} s")
        left_s = SCORING_SHARE * lease.deadline_s - (time.monotonic() - started)
        completions, rewards = await self._rewards_within(prompt, completions, left_s)
        trajectories = tuple(
            to_trajectory(
                c, f"{lease.group_id}#{lease.attempt}.{i}", len(prompt.token_ids), r, self.info,
                self.config.full_routes, self.stop_token_ids,
            )
            for i, (c, r) in enumerate(zip(completions, rewards, strict=True))
        )  # fmt: skip
        seconds = time.monotonic() - started
        return Group(
            lease.group_id, prompt, self.generator_id, lease.attempt, self.config.sampling.temperature, trajectories,
            seconds,
        )  # fmt: skip

    async def evaluation(self, lease: wire.LeaseMsg) -> wire.EvalResult:
        """Sample and score one held-out response; labelled with the version that sampled it.

        OutOfTime near the end of the lease, as for a group.
        """
        started = time.monotonic()
        prompt, limit_s = wire.prompt_from_msg(lease.prompt), SAMPLING_SHARE * lease.deadline_s
        completions = await self.engine.generate(prompt.token_ids, 1, self.params(lease.greedy), limit_s)
        if not completions:
            raise OutOfTime(f"an evaluation response was not sampled within {limit_s:.1f} s")
        left_s = SCORING_SHARE * lease.deadline_s - (time.monotonic() - started)
        (reward,) = self._values(prompt, await self._scores_within(prompt, completions, left_s))
        done = completions[0]
        versions = {s.version for s in done.segments} or {self.engine.version}
        if len(versions) > 1:
            raise MixedVersions(f"evaluation response of versions {', '.join(map(str, sorted(versions)))}")
        (version,) = versions
        answer = wire.EvalAnswer(
            prompt.prompt_id, lease.sample, lease.greedy, reward, len(done.token_ids), done.finish_reason
        )
        return wire.EvalResult(lease.eval_id, (version.epoch, version.update), [answer])

    @property
    def _fewest(self) -> int:
        size = self.config.algorithm.group_size
        return min(2, size) if self.config.replay.on_timeout == "partial" else size

    def _enough(self, finished: Sequence[object], what: str) -> None:
        if len(finished) < self._fewest:
            raise OutOfTime(f"{len(finished)} {what}")

    async def _rewards_within(
        self, prompt: Prompt, completions: list[Completion], limit_s: float
    ) -> tuple[list[Completion], list[float]]:
        """Scored completions with their rewards; under on_timeout: partial without those whose verifier is too slow."""
        scores = await self._scores_within(prompt, completions, limit_s)
        if self.config.replay.on_timeout == "partial":
            pairs = [(c, s) for c, s in zip(completions, scores, strict=True) if not s.timed_out]
            self._enough(pairs, f"of {len(completions)} responses were scored in time")
            completions, scores = [c for c, _ in pairs], [s for _, s in pairs]
        return completions, self._values(prompt, scores)

    async def _scores_within(self, prompt: Prompt, completions: list[Completion], limit_s: float) -> list[Score]:
        texts = [self.decoder.decode(c.token_ids) for c in completions]
        try:
            async with asyncio.timeout(max(0.0, limit_s)):
                return await self.pool.score_many([(prompt.source, t, prompt.answer) for t in texts])
        except TimeoutError as exc:
            raise OutOfTime(f"{len(completions)} responses were not scored within {limit_s:.1f} s") from exc

    def _values(self, prompt: Prompt, scores: list[Score]) -> list[float]:
        # A verifier that failed says nothing about the response: never a reward of 0.
        failed = [s.error for s in scores if s.reward is None]
        if failed:
            raise TaskError(f"{len(failed)} of {len(scores)} responses to {prompt.prompt_id} not scored: {failed[0]}")
        return [s.reward for s in scores if s.reward is not None]


def held_tuple(version: Version) -> tuple[int, int]:
    """Version as the wire carries it."""
    return (version.epoch, version.update)
