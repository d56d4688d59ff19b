"""Episodes of several turns: the policy and an environment of the user's take turns, until one of them is done.

Knows the engine, the environment's pool and the tokenizer, and no lease. Ids are never made again from text: a turn's
prompt is the ids of all that came before.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.base import Engine, Turn
from asyncrl.errors import TaskError
from asyncrl.generator.rollout import Rollout
from asyncrl.generator.turns import Played, check_turn, merge
from asyncrl.tasks.environments.observations import Observations
from asyncrl.tasks.environments.pool import EnvironmentFailed, EnvironmentPool, Episode
from asyncrl.tasks.environments.step import Step, add_parts
from asyncrl.tasks.pool import Score
from asyncrl.tasks.text import Decoder
from asyncrl.types import Completion, ModelInfo, Prompt, SamplingParams


@dataclass(frozen=True, slots=True)
class Episodes:
    """Plays episodes. max_turns: most responses of one. Use it from one event loop."""

    pool: EnvironmentPool
    observations: Observations
    decoder: Decoder
    info: ModelInfo
    max_turns: int
    _names: Iterator[int] = field(default_factory=itertools.count)

    async def play(
        self, engine: Engine, prompt: Prompt, n: int, sampling: SamplingParams, limit_s: float
    ) -> list[Rollout]:
        """Up to n episodes of one prompt, at the same time: those that ended within limit_s, in order.

        sampling.max_new_tokens bounds all tokens of an episode after its prompt, observations included. An episode
        whose environment failed has no reward, and says why. Raises EngineError as the engine does, TrajectoryError
        or RouteError when turns do not fit together, TaskError when no environment can be started.
        """
        until = asyncio.get_running_loop().time() + limit_s
        seeds = [None if sampling.seed is None else sampling.seed + i * self.max_turns for i in range(n)]
        tasks = [
            asyncio.create_task(self._play_one(engine, prompt, replace(sampling, seed=seed), until)) for seed in seeds
        ]
        try:
            ended = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [rollout for rollout in ended if rollout is not None]

    async def _play_one(self, engine: Engine, prompt: Prompt, sampling: SamplingParams, until: float) -> Rollout | None:
        """One episode; None when it did not end in time."""
        name = f"episode-{next(self._names)}"
        episode = self.pool.episode(prompt.text, prompt.answer, prompt.extra)
        try:
            return await _Conversation(self, engine, prompt, sampling, until, name, episode).play()
        finally:
            episode.close()
            engine.forget(name)


@dataclass(slots=True)
class _Conversation:
    """One episode while it is played."""

    settings: Episodes
    engine: Engine
    prompt: Prompt
    sampling: SamplingParams
    until: float
    name: str
    episode: Episode
    turns: list[Played] = field(default_factory=list)
    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)

    async def play(self) -> Rollout | None:
        """To its end; None when that did not come in time."""
        ids: NDArray[np.int32] | None = np.asarray(self.prompt.token_ids, np.int32)
        reason = ""
        while ids is not None:
            done = await self._respond(ids)
            if done is None:
                return None
            reason = done.finish_reason
            try:
                ids = await self._observe(ids, done)
            except EnvironmentFailed as exc:
                return Rollout(merge(self.turns, reason, self.name), Score(None, str(exc), exc.timed_out))
            except TimeoutError:
                return None
            if ids is not None and not self._has_room(ids):
                # The policy would have no token left to answer with.
                ids, reason = None, "length"
        return Rollout(merge(self.turns, reason, self.name), self._score())

    async def _respond(self, ids: NDArray[np.int32]) -> Completion | None:
        """One turn of the policy, checked and kept; None when the engine was told to stop before its end."""
        number, rows = len(self.turns), self._rows
        sampling = replace(
            self.sampling,
            max_new_tokens=self.sampling.max_new_tokens - (len(ids) - len(self.prompt.token_ids)),
            seed=None if self.sampling.seed is None else self.sampling.seed + number,
        )
        left_s = max(0.0, self.until - asyncio.get_running_loop().time())
        found = await self.engine.generate(ids, 1, sampling, left_s, None, Turn(self.name, rows))
        if not found:
            return None
        turn = Played(ids, rows, found[0])
        owner = f"{self.prompt.prompt_id} turn {number + 1}"
        check_turn(turn, self.settings.info, sampling.stop_token_ids, owner)
        # An empty answer says nothing, and an observation that nobody answered is no part of the response.
        if len(turn.completion.token_ids) or not self.turns:
            self.turns.append(turn)
        return turn.completion

    async def _observe(self, ids: NDArray[np.int32], done: Completion) -> NDArray[np.int32] | None:
        """What the next turn reads, int32 [P_k+1]; None when the episode is over. TimeoutError when time is."""
        text = self.settings.decoder.decode(done.token_ids)
        # The engine minds the time by itself, and says when it hangs.
        async with asyncio.timeout_at(self.until):
            step = await self.episode.step(text)
        self._add(step)
        over = step.done or step.observation is None or len(self.turns) >= self.settings.max_turns
        if over or done.finish_reason != "stop" or not len(done.token_ids):
            return None
        assert step.observation is not None
        try:
            observation = self.settings.observations.encode(step.observation, int(done.token_ids[-1]))
        except TaskError as exc:
            raise EnvironmentFailed(f"error: {exc}") from exc
        return np.concatenate([ids, done.token_ids, observation]).astype(np.int32)

    @property
    def _rows(self) -> int:
        """Route rows of the turns so far: all tokens but the last were read."""
        if not self.turns:
            return 0
        return len(self.turns[-1].prompt_ids) + len(self.turns[-1].completion.token_ids) - 1

    def _has_room(self, ids: NDArray[np.int32]) -> bool:
        return len(ids) - len(self.prompt.token_ids) < self.sampling.max_new_tokens

    def _add(self, step: Step) -> None:
        try:
            self.parts = add_parts(self.parts, step.parts)
        except ValueError as exc:
            raise EnvironmentFailed(f"error: {exc}") from exc
        self.reward += step.reward

    def _score(self) -> Score:
        return Score(self.reward, parts={**self.parts, "turns": float(len(self.turns))})
