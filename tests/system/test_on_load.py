"""Whole runs with each weights.on_load: what a weight load does to the responses that run."""

import json
import shutil

import pytest

from asyncrl.weights.place import directory_of
from tests.system.test_run import assert_clean, assert_lag_bound

PAD = 0

# The learner waits for the generator, so that most loads meet running responses.
BUSY = {
    "sampling.max_new_tokens": 100,
    "generator.groups_in_flight": 2,
    "staleness.sync_every": 1,
    "learner.updates": 16,
    "eval.every": 8,
}


@pytest.fixture(scope="module")
def talker(char_model, tmp_path_factory):
    """The model with another end token, one that it hardly ever samples."""
    folder = tmp_path_factory.mktemp("talker") / "model"
    shutil.copytree(char_model, folder)
    for name in ("generation_config.json", "config.json"):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {"eos_token_id": PAD}))
    return folder


def last(run, name):
    return [r[name] for r in run.updates() if name in r][-1]


@pytest.mark.parametrize(
    ("on_load", "carrier"),
    [("keep", "shm"), ("abort", "shm"), ("drain", "disk"), pytest.param("drain", "shm", marks=pytest.mark.long)],
)
def test_responses_have_one_version_unless_they_are_kept(start_run, talker, on_load, carrier):
    changes = {"weights.on_load": on_load, "weights.carrier": carrier, "model.path": talker}
    run = start_run(on_load, **BUSY, **changes)
    assert run.wait() == 0, run.text()
    assert_clean(run)
    assert [r["update"] for r in run.updates()] == list(range(16))
    assert_lag_bound(run, 4)
    mixed = sum(r["staleness/mixed_responses"] for r in run.updates())
    assert (mixed > 0) == (on_load == "keep")
    # A record has what the last heartbeat before it said; the lag rule alone asks for three loads by then.
    assert last(run, "generator/g0/loads") >= 2 and last(run, "generator/failed_loads") == 0
    assert on_load != "abort" or last(run, "generator/g0/resampled") > 0
    ids = [c["group_id"] for c in run.committed()]
    assert len(ids) == len(set(ids)) == 16 * 4
    assert {c["outcome"] for c in run.committed()} == {"trained"}
    # Evaluations at their pinned versions, as without a gate.
    assert [r["update"] for r in run.records() if r.get("eval/count")] == [0, 8, 16]
    assert "MixedVersions" not in run.text()
    if carrier == "shm":
        # Engines let go of what they loaded, so its memory is used again; nothing stays behind.
        assert last(run, "weights/reused") > 0
        assert not directory_of(run.folder / "weights").exists()
    assert not (run.folder / "weights").exists()
