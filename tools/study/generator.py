"""A generator of asyncrl whose engine is another one: `python generator.py CONFIG --id NAME`, as `asyncrl generate`.

STUDY_PRECISION: fp32, bf16 or fp8. STUDY_FAULT: one of faults.FAULTS but missed_syncs; then one group of eight is
sampled by a second engine with that fault, as by one broken generator of eight (eight processes would take eight times
the CPU time to start). Everything else, replay and learner included, is as ever.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from asyncrl import cli
from asyncrl.config import Config
from asyncrl.engines.around import Around
from asyncrl.engines.base import Engine, Source, Turn
from asyncrl.engines.probe import probe
from asyncrl.generator import role
from asyncrl.generator.open_engine import hash_seed
from asyncrl.types import Completion, ModelInfo, SamplingParams, Version
from study.faults import Kind, make_engine

ONE_IN = 8


class OneIn(Around):
    """Sends one prompt of ONE_IN to the other engine, by its tokens; evaluation to the good one."""

    def __init__(self, good: Engine, bad: Engine) -> None:
        super().__init__(good)
        self._bad = bad

    async def generate(
        self,
        prompt_ids: NDArray[np.int32],
        n: int,
        sampling: SamplingParams,
        limit_s: float | None = None,
        cut: asyncio.Event | None = None,
        turn: Turn | None = None,
    ) -> list[Completion]:
        """From one of both; turns of conversations from the good one."""
        is_bad = n > 1 and is_faulty(prompt_ids)
        return await (self._bad if is_bad else self._engine).generate(prompt_ids, n, sampling, limit_s, cut, turn)

    async def load(self, version: Version, source: Source) -> None:
        """Both."""
        await asyncio.gather(self._engine.load(version, source), self._bad.load(version, source))

    def close(self) -> None:
        """Both."""
        self._engine.close()
        self._bad.close()


def is_faulty(prompt_ids: NDArray[np.int32]) -> bool:
    """Whether the broken generator samples this prompt."""
    return xxhash.xxh3_64_intdigest(np.asarray(prompt_ids, np.int32).tobytes()) % ONE_IN == 0


@asynccontextmanager
async def open_engine(
    config: Config, run_dir: Path, generator_id: str, info: ModelInfo, sampling: SamplingParams
) -> AsyncIterator[Engine]:
    """Stands in for asyncrl.generator.open_engine.open_engine."""
    precision, fault = os.environ.get("STUDY_PRECISION", "fp32"), os.environ.get("STUDY_FAULT", "")
    rows = config.generator.groups_in_flight * config.algorithm.group_size
    model, seed = config.generator.model or config.model.path, hash_seed(config.run.seed, generator_id)
    engine: Any = make_engine(model, Kind(precision), seed, rows)
    if fault:
        engine = OneIn(engine, make_engine(model, Kind(precision, fault), seed + 1, rows))
    try:
        await probe(engine, sampling)
        yield engine
    finally:
        engine.close()


if __name__ == "__main__":
    role.open_engine = open_engine
    cli.app(["generate", *sys.argv[1:]])
