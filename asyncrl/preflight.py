"""Checks of the config against the model folders, the host and the task, before any training process starts.

Builds no task, binds nothing and writes no file.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from asyncrl.config import Config
from asyncrl.errors import ConfigError, TaskError, TransportError
from asyncrl.models.describe import describe, max_length
from asyncrl.replay.limits import check_capacity, largest_group_bytes
from asyncrl.sections.fleet import ReplaySection
from asyncrl.tasks.chain_sum import check_sizes, longest_prompt
from asyncrl.transport import keys
from asyncrl.transport.address import is_loopback, parse, refuse_open
from asyncrl.types import ModelInfo

log = logging.getLogger(__name__)


def preflight(config: Config) -> ModelInfo:
    """The learner's model. Raises ConfigError naming key, value and remedy."""
    info = _check_models(config)
    _check_length(config)
    try:
        check_sizes(config.task)
    except TaskError as exc:
        raise ConfigError(str(exc)) from exc
    check_capacity(config, largest_group_bytes(config, info, longest_prompt(config.task)))
    _check_bind(config.replay)
    _check_run_dir(config)
    return info


def _check_models(config: Config) -> ModelInfo:
    info = _describe("model.path", config.model.path)
    if config.generator.model is not None:
        other = _describe("generator.model", config.generator.model)
        for field in ("layers", "num_experts", "top_k", "vocab_size", "fingerprint"):
            ours, theirs = getattr(info, field), getattr(other, field)
            if ours != theirs:
                raise ConfigError(
                    f"generator.model={config.generator.model!r} differs from model.path={config.model.path!r} in "
                    f"{field} ({theirs!r} against {ours!r}); give both the same architecture and tokenizer, "
                    "or leave generator.model unset"
                )
    if not info.is_moe:
        if config.algorithm.routes == "r3":
            raise ConfigError(
                f"algorithm.routes=r3 needs a Mixture-of-Experts model, but model.path={config.model.path!r} is "
                "dense; set algorithm.routes=native"
            )
        if config.algorithm.rdc.mode != "off":
            raise ConfigError(
                f"algorithm.rdc.mode={config.algorithm.rdc.mode} needs a Mixture-of-Experts model, but "
                f"model.path={config.model.path!r} is dense; set algorithm.rdc.mode=off"
            )
    return info


def _describe(key: str, path: str) -> ModelInfo:
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"{key}={path!r} has no config.json; point it at a Hugging Face folder "
            "(`make quickstart` builds models/quickstart)"
        )
    try:
        return describe(path)
    except ValueError as exc:
        raise ConfigError(f"{key}={path!r}: {exc}") from exc


def _check_length(config: Config) -> None:
    prompt, new = longest_prompt(config.task), config.sampling.max_new_tokens
    limit = max_length(config.model.path)
    if prompt + new > limit:
        raise ConfigError(
            f"sampling.max_new_tokens={new} and a prompt of up to {prompt} tokens exceed the {limit} tokens that "
            f"model.path={config.model.path!r} can hold; set sampling.max_new_tokens <= {limit - prompt}"
            if prompt < limit
            else f"a prompt of up to {prompt} tokens leaves no room for sampling.max_new_tokens={new} in the {limit} "
            f"tokens that model.path={config.model.path!r} can hold; lower task.max_terms"
        )


def _check_bind(replay: ReplaySection) -> None:
    try:
        local = is_loopback(parse(replay.bind).host)
        refuse_open(replay.bind, replay.security, "replay.bind")
    except TransportError as exc:
        raise ConfigError(f"replay.bind={replay.bind!r}: {exc}; set replay.bind=tcp://127.0.0.1:*") from exc
    if replay.security == "curve":
        keys.check(replay.keys, replay.client)
    if replay.security == "none":
        who = "every user of this machine" if local else "anyone on the network"
        log.warning(
            "replay.security=none: %s who reaches replay.bind=%s can read prompts and feed the training; "
            "replay.security=curve lets only your own keys in (docs/security.md)",
            who,
            replay.bind,
        )


def _check_run_dir(config: Config) -> None:
    """The nearest thing that exists on the way to the run folder must be a folder we may write in."""
    folder = config.run_dir
    try:
        found = next(p for p in (folder, *folder.parents) if _exists(p))
        usable = found.is_dir() and os.access(found, os.W_OK | os.X_OK)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"run.dir={config.run.dir!r}: {exc}; set run.dir to a folder") from exc
    if not usable:
        state = "cannot be written" if found.is_dir() else "is not a folder"
        raise ConfigError(f"run.dir={config.run.dir!r}: {str(found)!r} {state}; set run.dir to another folder")


def _exists(path: Path) -> bool:
    """False only for what could still be made; a dangling link exists. Raises OSError or ValueError for a bad name."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
