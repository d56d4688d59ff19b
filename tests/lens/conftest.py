"""A run folder with dumps of updates 0 and 2 and the policy after update 3."""

import pytest

from tests.helpers.dumped_run import settings, train
from tests.helpers.tiny_models import qwen3_moe


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lens") / "start"
    qwen3_moe(hidden=32, layers=2, experts=8, top_k=2, vocab=64, seed=3).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def run(start, world, tmp_path_factory):
    config = settings(tmp_path_factory.mktemp("runs") / "run", start)
    train(config, world, 4)
    return config.run_dir
