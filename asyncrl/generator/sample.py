"""One lease -> one scored group (or evaluation answers). Knows the engine and the verifiers only."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from asyncrl import wire
from asyncrl.config import Config
from asyncrl.engines.base import Engine
from asyncrl.errors import EngineError, TaskError
from asyncrl.generator.collect import to_trajectory
from asyncrl.generator.episodes import Episodes
from asyncrl.generator.failures import Warnings
from asyncrl.generator.rollout import Rollout, rollouts
from asyncrl.generator.shaping import shape
from asyncrl.tasks.pool import RewardPool, Score, request_of
from asyncrl.tasks.text import Decoder
from asyncrl.types import Completion, Group, ModelInfo, Prompt, SamplingParams, Trajectory, Version

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
    """Samples and scores leases on one engine.

    counters: verifier_errors and verifier_timeouts, responses that have no reward for it; late, groups of fewer
    responses because the others were not sampled in time.
    """

    engine: Engine
    pool: RewardPool
    decoder: Decoder
    info: ModelInfo
    config: Config
    generator_id: str
    stop_token_ids: tuple[int, ...]
    episodes: Episodes | None = None
    counters: Counter[str] = field(default_factory=lambda: Counter(verifier_errors=0, verifier_timeouts=0, late=0))
    warnings: Warnings = field(default_factory=Warnings)

    def gauges(self) -> dict[str, float]:
        """What a heartbeat says of scoring, all counts so far."""
        pools = [self.pool.counters, self.episodes.pool.counters] if self.episodes else [self.pool.counters]
        out = {name: float(self.counters[name]) for name in ("verifier_errors", "verifier_timeouts")}
        return out | {"verifier_restarts": float(sum(counters["restarts"] for counters in pools))}

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
        sampled = await rollouts(self.engine, prompt, size, self.params(), limit_s, self.episodes)
        self._enough(sampled, f"of {size} responses were sampled within {limit_s:.1f} s")
        self.counters["late"] += len(sampled) < size
        left_s = SCORING_SHARE * lease.deadline_s - (time.monotonic() - started)
        scored = self._with_reward(prompt, sampled, await self._scores_within(prompt, sampled, left_s))
        trajectories = tuple(
            self._trajectory(prompt, c, s, f"{lease.group_id}#{lease.attempt}.{i}") for i, (c, s) in enumerate(scored)
        )
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
        sampled = await rollouts(self.engine, prompt, 1, self.params(lease.greedy), limit_s, self.episodes)
        if not sampled:
            raise OutOfTime(f"an evaluation response was not sampled within {limit_s:.1f} s")
        left_s = SCORING_SHARE * lease.deadline_s - (time.monotonic() - started)
        scores = await self._scores_within(prompt, sampled, left_s)
        ((done, score),) = self._with_reward(prompt, sampled, scores, fewest=1)
        versions = {s.version for s in done.segments} or {self.engine.version}
        if len(versions) > 1:
            raise MixedVersions(f"evaluation response of versions {', '.join(map(str, sorted(versions)))}")
        (version,) = versions
        answer = wire.EvalAnswer(
            prompt.prompt_id, lease.sample, lease.greedy, score.reward or 0.0, len(done.token_ids), done.finish_reason,
            score.extracted, dict(score.parts),
        )  # fmt: skip
        return wire.EvalResult(lease.eval_id, (version.epoch, version.update), [answer])

    @property
    def _fewest(self) -> int:
        size = self.config.algorithm.group_size
        return min(2, size) if self.config.replay.on_timeout == "partial" else size

    def _enough(self, finished: Sequence[object], what: str) -> None:
        if len(finished) < self._fewest:
            raise OutOfTime(f"{len(finished)} {what}")

    async def _scores_within(self, prompt: Prompt, sampled: Sequence[Rollout], limit_s: float) -> list[Score]:
        """One score per response; what an environment scored is not scored again."""
        open_ = [r.completion for r in sampled if r.score is None]
        requests = [request_of(self.config, prompt, self.decoder.decode(c.token_ids)) for c in open_]
        try:
            async with asyncio.timeout(max(0.0, limit_s)):
                found = iter(await self.pool.score_many(requests))
        except TimeoutError as exc:
            raise OutOfTime(f"{len(open_)} responses were not scored within {limit_s:.1f} s") from exc
        return [next(found) if r.score is None else r.score for r in sampled]

    def _with_reward(
        self, prompt: Prompt, sampled: Sequence[Rollout], scores: Sequence[Score], fewest: int = 2
    ) -> list[tuple[Completion, Score]]:
        """The responses that have a reward, counting the others. TaskError when that leaves fewer than `fewest`.

        A verifier that failed says nothing about a response: that is never a reward of 0.
        """
        pairs = [(r.completion, s) for r, s in zip(sampled, scores, strict=True)]
        failed = [s for s in scores if s.reward is None]
        if not failed:
            return pairs
        num_late = sum(s.timed_out for s in failed)
        self.counters["verifier_timeouts"] += num_late
        self.counters["verifier_errors"] += len(failed) - num_late
        said = f"{len(failed)} of {len(scores)} responses to {prompt.prompt_id} not scored: {failed[0].error}"
        left = [(c, s) for c, s in pairs if s.reward is not None]
        if len(left) < min(fewest, len(pairs)):
            raise TaskError(said)
        self.warnings.say("not scored", f"{said}; the group goes on with the other {len(left)}")
        return left

    def _trajectory(self, prompt: Prompt, done: Completion, score: Score, name: str) -> Trajectory:
        """One checked trajectory with its shaped reward."""
        assert score.reward is not None
        c = self.config
        reward, parts = shape(
            score.reward, score.parts, len(done.token_ids), done.finish_reason, c.algorithm, c.sampling.max_new_tokens
        )
        made = to_trajectory(
            done, name, len(prompt.token_ids), reward, self.info, c.full_routes, self.stop_token_ids
        )  # fmt: skip
        return replace(made, parts=parts)


def held_tuple(version: Version) -> tuple[int, int]:
    """Version as the wire carries it."""
    return (version.epoch, version.update)
