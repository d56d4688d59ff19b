"""A tiny model for the in-process tests of this folder."""

import pytest

from tests.helpers.tiny_models import qwen3_moe


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    qwen3_moe(hidden=32, layers=2, experts=8, top_k=2, vocab=64, seed=3).save_pretrained(folder)
    return str(folder)
