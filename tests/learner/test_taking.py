"""Ranks that get their shards at different times."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from asyncrl import wire
from asyncrl.process import role_environment
from tests.helpers.scripted_replay import Replay, plain

ROOT = Path(__file__).parents[2]
ASKED = 6
"""Each slice of 2 s asks once at least: this outlasts the collectives of 10 s."""


@pytest.mark.timeout(300)
def test_a_rank_that_has_its_shard_waits_for_the_others_longer_than_a_collective(tmp_path):
    """Replay answers rank 0 at once and rank 1 late, as one that is started again in between."""
    takes = Counter()

    def answers(message):
        if not isinstance(message, wire.Take):
            return plain(message)
        takes[message.rank] += 1
        ready = message.rank == 0 or takes[1] > ASKED
        return [wire.TakeReply(message.take_id, True, "", [], [message.rank], [])] if ready else []

    replay = Replay(tmp_path / "replay.address", answers)
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            str(ROOT / "tests/learner/take_worker.py"), str(tmp_path / "replay.address"), str(tmp_path),
        ],
        cwd=ROOT, env={**role_environment(1), "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    replay.end()
    assert done.returncode == 0, done.stderr[-4000:]
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["[0]", "[1]"]
    assert takes[1] > ASKED
