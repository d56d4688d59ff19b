"""Checks of the reference policy of the KL term, before any process starts. Reads its folder, loads nothing."""

from __future__ import annotations

from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.models.describe import describe, max_length
from asyncrl.models.folder import weights_of
from asyncrl.models.vocabulary import vocabulary_difference


def check(path: str, model: str, longest: int) -> None:
    """Raise ConfigError with key, value and remedy when algorithm.kl.reference=path cannot score what the policy in
    model.path samples. Another architecture can.

    longest: tokens of a prompt with its response. The files with the weights must be whole and readable, by their
    headers.
    """
    key = f"algorithm.kl.reference={path!r}"
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"{key} has no config.json; point it at a Hugging Face folder, or set algorithm.kl.reference=null for "
            "model.path"
        )
    try:
        describe(path)
        weights_of(path)
        other = vocabulary_difference(model, path)
    except ConfigError as exc:
        raise ConfigError(f"{key}: {exc}") from exc
    if other:
        raise ConfigError(
            f"{key} has another vocabulary than model.path={model!r} ({other}): it cannot score its "
            "responses; point it at a model with the same tokenizer, or set algorithm.kl.reference=null for model.path"
        )
    holds = max_length(path, None)
    if longest > holds:
        raise ConfigError(
            f"{key} can hold {holds} tokens, and a prompt with its response takes up to {longest}; point it at a model "
            "for longer ones, or lower sampling.max_new_tokens"
        )
