"""One lease -> one scored group (or evaluation answers). Knows the engine and the verifiers only."""

from __future__ import annotations

import time
from dataclasses import dataclass

from asyncrl import wire
from asyncrl.config import Config
from asyncrl.engines.base import Engine
from asyncrl.errors import EngineError, TaskError
from asyncrl.generator.collect import to_trajectory
from asyncrl.tasks.pool import RewardPool
from asyncrl.tasks.text import Decoder
from asyncrl.types import Completion, Group, ModelInfo, Prompt, SamplingParams, Version


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
        """Sample and score the group of a training lease.

        Raises EngineError, RouteError or TaskError; the lease is then given back.
        """
        started = time.monotonic()
        prompt = wire.prompt_from_msg(lease.prompt)
        completions = await self.engine.generate(prompt.token_ids, self.config.algorithm.group_size, self.params())
        rewards = await self._rewards(prompt, completions)
        trajectories = tuple(
            to_trajectory(
                c, f"{lease.group_id}#{lease.attempt}.{i}", len(prompt.token_ids), r, self.info,
                self.config.full_routes,
            )
            for i, (c, r) in enumerate(zip(completions, rewards, strict=True))
        )  # fmt: skip
        seconds = time.monotonic() - started
        return Group(
            lease.group_id, prompt, self.generator_id, lease.attempt, self.config.sampling.temperature, trajectories,
            seconds,
        )  # fmt: skip

    async def evaluation(self, lease: wire.LeaseMsg) -> wire.EvalResult:
        """Sample and score one held-out response; labelled with the version that sampled it."""
        prompt = wire.prompt_from_msg(lease.prompt)
        completions = await self.engine.generate(prompt.token_ids, 1, self.params(lease.greedy))
        (reward,) = await self._rewards(prompt, completions)
        done = completions[0]
        versions = {s.version for s in done.segments} or {self.engine.version}
        if len(versions) > 1:
            raise MixedVersions(f"evaluation response of versions {', '.join(map(str, sorted(versions)))}")
        (version,) = versions
        answer = wire.EvalAnswer(
            prompt.prompt_id, lease.sample, lease.greedy, reward, len(done.token_ids), done.finish_reason
        )
        return wire.EvalResult(lease.eval_id, (version.epoch, version.update), [answer])

    async def _rewards(self, prompt: Prompt, completions: list[Completion]) -> list[float]:
        texts = [self.decoder.decode(c.token_ids) for c in completions]
        scores = await self.pool.score_many([(prompt.source, t, prompt.answer) for t in texts])
        # A verifier that failed says nothing about the response: never a reward of 0.
        failed = [s.error for s in scores if s.reward is None]
        if failed:
            raise TaskError(f"{len(failed)} of {len(texts)} responses to {prompt.prompt_id} not scored: {failed[0]}")
        return [s.reward for s in scores if s.reward is not None]


def held_tuple(version: Version) -> tuple[int, int]:
    """Version as the wire carries it."""
    return (version.epoch, version.update)
