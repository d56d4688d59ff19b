"""A process group of one rank for the in-process tests of this folder."""

import pytest
import torch
import torch.distributed as dist
from tests.helpers.tiny_models import qwen3_moe

from asyncrl.learner.shard import World


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield World(0, 1, torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    qwen3_moe(hidden=32, layers=2, experts=8, top_k=2, vocab=64, seed=3).save_pretrained(folder)
    return str(folder)
