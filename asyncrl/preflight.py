"""Checks between the config and the model folders, before any training process starts."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.models.describe import describe
from asyncrl.types import ModelInfo


def preflight(config: Config) -> ModelInfo:
    """The learner's model. Raises ConfigError naming key, value and remedy."""
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
