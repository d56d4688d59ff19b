"""Probes on two real ranks: scored as a batch would be, on rank 0 alone, and without a trace in the update."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.learner.client import _shard
from asyncrl.process import role_environment
from asyncrl.types import ModelInfo
from asyncrl.wire import TakeReply, encode_group
from tests.learner.groups import make_groups

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def ranks(model_dir, tmp_path_factory):
    """What each rank wrote down. Waits at most 400 s."""
    out = tmp_path_factory.mktemp("probes")
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            str(ROOT / "tests/learner/probe_worker.py"), model_dir, str(out),
        ],
        cwd=ROOT, env={**role_environment(1), "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("routes", ["native", "r3"])
def test_an_update_is_the_same_bit_for_bit_with_and_without_probes(ranks, routes):
    for found in (r[routes] for r in ranks):
        assert len(set(found["weights"])) == 1
        assert found["table"] == [True, 32]
        assert found["columns"]


@pytest.mark.parametrize("routes", ["native", "r3"])
def test_probes_are_scored_on_rank_0_as_a_batch_would_be(ranks, routes):
    assert [r[routes]["rows"] for r in ranks] == [20, 0]
    assert ranks[0][routes]["apart"] < 1e-5
    assert all(r[routes]["none"] for r in ranks)


def test_a_shard_keeps_probes_apart_from_its_batches():
    groups = make_groups(ModelInfo((0, 1), 8, 2, 64, "f"), 3, 2, 0)
    frames = [encode_group(g)[1:] for g in groups]
    reply = TakeReply(4, True, "", [0, -1, 1], [5, 6], [len(f) for f in frames])
    shard = _shard(reply, [buffer for f in frames for buffer in f])
    assert [[g.group_id for g in batch] for batch in shard.batches] == [["0/p0"], ["0/p2"]]
    assert [g.group_id for g in shard.probes] == ["0/p1"]
