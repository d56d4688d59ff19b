"""Samples and scores the responses that are still missing, on an engine as a generator has it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import xxhash

from asyncrl.config import Config
from asyncrl.engines.base import Engine
from asyncrl.errors import ConfigError, TaskError
from asyncrl.evaluate.answers import Answers, Record
from asyncrl.evaluate.questions import Key
from asyncrl.generator.episodes import Episodes
from asyncrl.generator.leave import until_signal
from asyncrl.generator.open_engine import open_engine
from asyncrl.generator.role import episodes_of
from asyncrl.generator.rollout import rollouts
from asyncrl.models.describe import describe
from asyncrl.tasks.base import read_stop_token_ids
from asyncrl.tasks.held_out import set_of
from asyncrl.tasks.pool import RewardPool, Score, pool_of, request_of
from asyncrl.tasks.text import Decoder
from asyncrl.types import Prompt, SamplingParams

GENERATOR = "g0"
"""Name of the engine: the seed of a server, its log and its port follow from it."""

NOT_SAMPLED = "timeout"
"""finish_reason of a response that took too long."""

Missing = list[tuple[Key, Prompt]]


def ask(config: Config, missing: Missing, answers: Answers, told: Callable[[], None]) -> int:
    """Add every missing answer; those without a reward are asked again, replay.max_attempts times in all.

    told: called after each that is not asked again. 0, or 128 + n when signal n ended it in order. ConfigError and
    EngineError as `open_engine`, and ConfigError for rewards that cannot be loaded; EngineError and TaskError of one
    response end all. What was answered by then stays.
    """
    return asyncio.run(until_signal(_ask_all(config, missing, answers, told)))


async def _ask_all(config: Config, missing: Missing, answers: Answers, told: Callable[[], None]) -> int:
    model, g = config.model.path, config.generator
    info = describe(model)
    sampling = SamplingParams(config.sampling.temperature, config.sampling.max_new_tokens, read_stop_token_ids(model))
    rows = g.groups_in_flight * config.algorithm.group_size
    # Asked again, each episode has a process to itself: none that hangs or crashes can take others with it.
    alone = min(rows, g.environment_workers) if config.task.environment else rows
    with contextlib.ExitStack() as stack:
        # A reward that cannot be loaded is said before a server takes minutes to start.
        pool = stack.enter_context(pool_of(config))
        try:
            await pool.start()
        except TaskError as exc:
            raise ConfigError(str(exc)) from exc
        episodes = episodes_of(config, model, info, stack)
        async with open_engine(config, answers.out, GENERATOR, info, sampling) as engine:
            asker = _Asker(config, engine, pool, Decoder(model), sampling, episodes)
            for attempt in range(1, config.replay.max_attempts + 1):
                if not missing:
                    break
                last = attempt == config.replay.max_attempts
                missing = await _pass(asker, missing, answers, told, last, rows if attempt == 1 else alone)
    return 0


async def _pass(
    asker: _Asker, missing: Missing, answers: Answers, told: Callable[[], None], last: bool, rows: int
) -> Missing:
    """Ask for each once, `rows` at a time; those that got no reward, in their order. last: they are told of, too."""
    left, failed = iter(missing), set[Key]()

    async def work() -> None:
        for key, prompt in left:
            record = await asker.answer(key, prompt, answers.before(key))
            answers.add(record)
            if record["reward"] is None:
                failed.add(key)
            if record["reward"] is not None or last:
                told()

    workers = [asyncio.create_task(work()) for _ in range(min(rows, len(missing)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [(key, prompt) for key, prompt in missing if key in failed]


@dataclass(frozen=True, slots=True)
class _Asker:
    config: Config
    engine: Engine
    pool: RewardPool
    decoder: Decoder
    sampling: SamplingParams
    episodes: Episodes | None

    async def answer(self, key: Key, prompt: Prompt, before: Record | None) -> Record:
        """One response as a line. A verifier that fails gives a line without a reward, and with the error.

        before: such a line of this response, which is scored again as it is; an episode is played again.
        """
        started = time.monotonic()
        if before is not None and self.episodes is None and before["finish_reason"] != NOT_SAMPLED:
            text, tokens, reason = before["response"], before["tokens"], before["finish_reason"]
            (again,) = await self.pool.score_many([request_of(self.config, prompt, text)])
            return _line(key, prompt, started, text, tokens, reason, again)
        limit_s = self.config.replay.lease_timeout_s
        sampled = await rollouts(self.engine, prompt, 1, self._params(key), limit_s, self.episodes)
        if not sampled:
            error = (
                f"not sampled within replay.lease_timeout_s={limit_s:g} s; raise it, or lower sampling.max_new_tokens"
            )
            return _line(key, prompt, started, "", 0, NOT_SAMPLED, Score(None, error))
        completion, score = sampled[0]
        text = self.decoder.decode(completion.token_ids)
        if score is None:
            (score,) = await self.pool.score_many([request_of(self.config, prompt, text)])
        return _line(key, prompt, started, text, len(completion.token_ids), completion.finish_reason, score)

    def _params(self, key: Key) -> SamplingParams:
        """The embedded engine samples each response from a seed of its own: it is the same in whatever company."""
        if key.greedy or self.config.generator.engine == "sglang":
            return replace(self.sampling, greedy=key.greedy)
        name = f"{self.config.run.seed}|{key.prompt_id}|{key.sample}"
        return replace(self.sampling, seed=int(xxhash.xxh3_64_intdigest(name.encode()) % 2**31))


def _line(key: Key, prompt: Prompt, started: float, text: str, tokens: int, finish_reason: str, score: Score) -> Record:
    record: Record = {
        "prompt_id": key.prompt_id, "set": set_of(prompt), "sample": key.sample, "greedy": key.greedy,
        "prompt": prompt.text, "response": text, "tokens": tokens, "extracted": score.extracted,
        "gold": prompt.answer, "reward": score.reward, "parts": dict(score.parts), "finish_reason": finish_reason,
        "seconds": round(time.monotonic() - started, 3),
    }  # fmt: skip
    return record | ({"error": score.error} if score.reward is None else {})
