"""Fleets over the real ssh and the real SLURM. `make test-system` runs this folder; `make test` does not."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from asyncrl.process import role_environment
from tests.fleet import cluster, namespaces
from tests.helpers.char_model import save_char_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def place():
    """A folder for keys, models and runs, with a short path: SLURM's sockets have one."""
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-fleet-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def char_model(place):
    """A random Qwen3-MoE with the character tokenizer of chain_sum."""
    return save_char_model(place / "model", steps=0)


@pytest.fixture(scope="session")
def hosts(place):
    """Three hosts with sshd that share no folder that a run writes."""
    if why := namespaces.missing():
        pytest.skip(f"ssh fleets: {why}")
    made = namespaces.Hosts(place / "ssh", place / "runs", 3)
    yield made
    made.close()


@pytest.fixture(scope="session")
def slurm(place):
    """A SLURM of three nodes on this machine."""
    if why := cluster.missing():
        pytest.skip(f"SLURM fleets: {why}")
    made = cluster.Cluster(place / "slurm")
    yield made
    made.close()


@pytest.fixture(scope="session")
def environment():
    """For a launcher: few threads, and this Python found first."""
    return role_environment(1) | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
