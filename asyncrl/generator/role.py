"""The generator role: builds the engine and everything around it, runs the loop, closes all of it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

from asyncrl.config import Config
from asyncrl.generator.episodes import Episodes
from asyncrl.generator.leave import until_signal
from asyncrl.generator.loop import Generator
from asyncrl.generator.open_engine import open_engine
from asyncrl.generator.sample import Sampler
from asyncrl.models.describe import describe
from asyncrl.tasks.base import read_stop_token_ids
from asyncrl.tasks.environments.observations import Observations
from asyncrl.tasks.environments.pool import EnvironmentPool
from asyncrl.tasks.pool import pool_of
from asyncrl.tasks.text import Decoder
from asyncrl.types import ModelInfo, SamplingParams


async def serve(config: Config, run_dir: Path, generator_id: str, info: ModelInfo) -> int:
    """Build the parts of one generator around a probed engine, run until stopped, close everything.

    Returns the exit status: 0 when replay said that the run is over, 128 + n after signal n.
    """
    model = config.generator.model or config.model.path
    sampling = SamplingParams(config.sampling.temperature, config.sampling.max_new_tokens, read_stop_token_ids(model))
    # A server may take minutes to start, and has to be ended in order then, too.
    return await until_signal(_serve(config, run_dir, generator_id, info, model, sampling))


async def _serve(
    config: Config, run_dir: Path, generator_id: str, info: ModelInfo, model: str, sampling: SamplingParams
) -> int:
    # The pool is closed first: it asks nothing of the engine, and its workers end at once.
    async with open_engine(config, run_dir, generator_id, info, sampling) as engine:
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(pool_of(config))
            episodes = episodes_of(config, model, info, stack)
            sampler = Sampler(
                engine, pool, Decoder(model), info, config, generator_id, sampling.stop_token_ids, episodes
            )
            place = config.replay.connect or run_dir / "replay.address"
            generator = Generator(config, place, sampler, generator_id)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, generator.on_signal, number)
            try:
                await generator.run()
            finally:
                # Told to stop, it has waited for all that matters, or for a replay that is gone.
                if generator.cause is None and not generator.over:
                    generator.link.leave()
                else:
                    await generator.link.close()
    return 128 + generator.signal if generator.signal and not generator.over else 0


def episodes_of(config: Config, model: str, info: ModelInfo, stack: contextlib.ExitStack) -> Episodes | None:
    """What plays the episodes of task.environment, closed with the stack; None without one."""
    g, t = config.generator, config.task
    if t.environment is None:
        return None
    workers = EnvironmentPool(t.environment, g.environment_workers, g.reward_timeout_s, g.reward_memory_bytes)
    pool = stack.enter_context(workers)
    return Episodes(pool, Observations(model, t.chat), Decoder(model), info, t.max_turns)


def run(config: Config, run_dir: Path, generator_id: str) -> None:
    """The generator role. Raises the error that ended it, SystemExit(128 + n) after signal n."""
    info = describe(config.generator.model or config.model.path)
    status = asyncio.run(serve(config, run_dir, generator_id, info))
    if status:
        # Nobody in the run said that it is over: whoever watches starts it again.
        raise SystemExit(status)
