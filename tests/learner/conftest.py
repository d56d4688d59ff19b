"""A tiny model for the in-process tests of this folder."""

import pytest

from tests.helpers.tiny_models import qwen3_moe


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    qwen3_moe(hidden=32, layers=2, experts=8, top_k=2, vocab=64, seed=3).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def made(model_dir, world):
    """A policy on one rank and its updater."""
    from asyncrl.config import validate
    from asyncrl.learner.shard import build_policy
    from asyncrl.learner.step import Updater

    settings = validate({"model": {"path": model_dir}})
    policy = build_policy(settings.model, settings.learner, False, world)
    return policy, Updater(policy, settings.learner, settings.algorithm, world)
