"""Where a learner begins: at its newest checkpoint or at the start model, and in which run epoch."""

from __future__ import annotations

import logging
from pathlib import Path

from asyncrl.config import Config
from asyncrl.learner.shard import World
from asyncrl.learner.stored import Progress, fingerprint
from asyncrl.learner.table import all_max
from asyncrl.metrics.sink import FILE, read_jsonl
from asyncrl.types import ModelInfo, Version
from asyncrl.wire import Welcome

log = logging.getLogger(__name__)


def model_fingerprint(config: Config, info: ModelInfo) -> str:
    """What a checkpoint must have in common with this learner: architecture, tokenizer and stored precision."""
    stored = "float64" if config.model.dtype == "float64" else "float32"
    return fingerprint(
        {
            "layers": info.layers,
            "num_experts": info.num_experts,
            "top_k": info.top_k,
            "vocab_size": info.vocab_size,
            "model": info.fingerprint,
            "stored": stored,
        }
    )


def begin(found: Progress | None, welcome: Welcome, world: World) -> Progress:
    """Progress to go on from, its epoch newer than every version that was ever published. A collective.

    Run epoch 0 is a run's first learner. Every later one publishes as a new epoch, and what replay has from after
    `found` is undone; without a checkpoint that is everything.
    """
    known, epoch = all_max([float(welcome.newest is not None), float(welcome.epoch)], world)
    if found is None and not known:
        return Progress(0, 0, 0, 0.0)
    start = found if found is not None else Progress(0, 0, 0, 0.0)
    start = start.in_epoch(max(start.epoch, int(epoch)) + 1)
    if world.is_writer and found is not None:
        log.warning("going on from the checkpoint of update %d as run epoch %d", start.update, start.epoch)
    elif world.is_writer:
        log.warning(
            "replay is at update %d, but there is no checkpoint (learner.checkpoint_every): training begins again from "
            "model.path as run epoch %d, and all updates so far are undone", welcome.update, start.epoch,
        )  # fmt: skip
    return start


def evaluated(run_dir: Path) -> set[str]:
    """Versions whose evaluation an earlier learner of this run recorded, as words."""
    file = run_dir / FILE
    records = read_jsonl(file) if file.exists() else []
    return {str(Version(int(r["eval/epoch"]), int(r["eval/version"]))) for r in records if "eval/epoch" in r}
