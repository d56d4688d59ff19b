"""B53: checkpoints that are written while updates run: killed at any instant, on a slow disk, on a full one."""

import resource
import shutil
import threading
import time

import pytest
import torch

from asyncrl.learner import shards, stored
from asyncrl.learner.checkpoint import Checkpoints
from asyncrl.learner.stored import Progress, newest
from tests.learner.killed_save import at_each_line, stop

pytestmark = pytest.mark.timeout(300)


def mark(policy, value):
    with torch.no_grad():
        policy.model.lm_head.weight.fill_(value)


def marked(policy):
    (value,) = policy.model.lm_head.weight.full_tensor().unique().tolist()
    return value


def kept_at_lines(run, folder, save):
    """Copies of `run` as a kill before sampled lines of `save` would leave it, in the order of the lines."""
    copies, next_at = [], [1]

    def keep(line):
        if line < next_at[0]:
            return
        copies.append(shutil.copytree(run, folder / f"line-{line:06d}"))
        # More of them in the part that gives the names.
        next_at[0] = line + (9 if (run / "checkpoints" / "u4").exists() else 103)

    at_each_line(keep)
    try:
        assert save()
    finally:
        stop()
    return copies


def test_left_before_any_line_of_a_save_the_newest_complete_one_is_loaded(made, tmp_path, world, monkeypatch):
    """With real kills: tests/long/test_killed_saves.py."""
    monkeypatch.setattr(shards, "BLOCK", 1 << 14)
    run = tmp_path / "run"
    mark(made[0], 2.0)
    assert Checkpoints(run, "f", 1, world).save(*made, Progress(0, 2, 2, 0.0))
    mark(made[0], 4.0)
    copies = kept_at_lines(run, tmp_path, lambda: Checkpoints(run, "f", 1, world).save(*made, Progress(0, 4, 4, 0.0)))
    found = []
    for left in [*copies, run]:
        has_name = (left / "checkpoints" / "u4").exists()
        progress = Checkpoints(left, "f", 1, world).load(*made)
        assert progress == newest(left)
        assert marked(made[0]) == progress.update == (4 if has_name else 2), left
        assert not list((left / "checkpoints").glob("*.part"))
        found.append(progress.update)
    assert found == sorted(found) and found.count(2) >= 20 and found.count(4) >= 3, found


@pytest.fixture
def gate(monkeypatch):
    """Holds the threads that write until it is set."""
    opened, write = threading.Event(), shards.write

    def slow(file, parts):
        assert opened.wait(60)
        return write(file, parts)

    monkeypatch.setattr(shards, "write", slow)
    yield opened
    opened.set()


def test_updates_run_while_a_checkpoint_is_written_and_none_of_them_gets_into_it(made, tmp_path, world, gate):
    checkpoints = Checkpoints(tmp_path, "f", 2, world)
    mark(made[0], 2.0)
    assert checkpoints.begin(*made, Progress(0, 2, 2, 0.5))
    mark(made[0], 3.0)
    assert not checkpoints.settle() and checkpoints.pending.update == 2 and checkpoints.newest == -1
    assert newest(tmp_path) is None
    gate.set()
    assert checkpoints.settle(60.0) and checkpoints.newest == 2
    assert not checkpoints.settle()
    assert checkpoints.load(*made) == Progress(0, 2, 2, 0.5) and marked(made[0]) == 2.0


def test_one_that_is_still_being_written_when_the_next_is_due_is_waited_for_once(made, tmp_path, world, gate, caplog):
    checkpoints = Checkpoints(tmp_path, "f", 2, world, limit_s=0.2)
    assert checkpoints.begin(*made, Progress(0, 2, 2, 0.0))
    assert not checkpoints.begin(*made, Progress(0, 4, 4, 0.0))
    waited = checkpoints.stood_s
    assert waited >= 0.2 and checkpoints.failures == 1
    assert "u4 was not written: that of update 2 is still being written" in caplog.text
    assert not checkpoints.begin(*made, Progress(0, 6, 6, 0.0))
    assert checkpoints.stood_s - waited < waited and checkpoints.failures == 2
    gate.set()
    deadline = time.monotonic() + 60
    while not checkpoints.settle():
        assert time.monotonic() < deadline
    assert checkpoints.begin(*made, Progress(0, 8, 8, 0.0)) and checkpoints.settle(60.0)
    assert stored.names(tmp_path / "checkpoints") in (["u2", "u8"], ["u8", "u2"]) and checkpoints.failures == 2


def test_a_full_disk_is_named_leaves_the_only_checkpoint_and_costs_nothing_later(made, tmp_path, world, caplog):
    checkpoints = Checkpoints(tmp_path, "f", 1, world)
    mark(made[0], 2.0)
    assert checkpoints.save(*made, Progress(0, 2, 2, 0.0))
    mark(made[0], 4.0)
    size = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, size[1]))
        assert not checkpoints.save(*made, Progress(0, 4, 4, 0.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, size)
    assert "u4 was not written: [Errno 27] File too large" in caplog.text
    assert (checkpoints.failures, checkpoints.newest, marked(made[0])) == (1, 2, 4.0)
    assert [f.name for f in (tmp_path / "checkpoints").iterdir()] == ["u2"]
    assert checkpoints.save(*made, Progress(0, 6, 6, 0.0))
    assert [f.name for f in (tmp_path / "checkpoints").iterdir()] == ["u6"]


def test_a_parameter_that_was_never_stepped_is_saved_and_goes_on_as_without(made, tmp_path, world):
    policy, updater = made
    updater._optimizer.state.clear()
    checkpoints = Checkpoints(tmp_path, "f", 1, world)
    assert checkpoints.save(policy, updater, Progress(0, 0, 0, 0.0))

    def step():
        for parameter in policy.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        updater._optimizer.step()
        updater._optimizer.zero_grad(set_to_none=True)
        return [p.full_tensor().clone() for p in policy.parameters()]

    stepped = step()
    updater._optimizer.state.clear()
    assert checkpoints.load(policy, updater).update == 0
    updater._optimizer.state.clear()
    without = step()
    assert checkpoints.load(policy, updater).update == 0
    for one, two, three in zip(stepped, without, step(), strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


def test_the_files_are_what_transformers_and_dcp_call_safetensors(made, tmp_path, world):
    from safetensors.torch import load_file

    policy, updater = made
    assert Checkpoints(tmp_path, "f", 1, world).save(policy, updater, Progress(0, 2, 2, 0.0))
    (file,) = (tmp_path / "checkpoints" / "u2").glob("*.safetensors")
    held = load_file(file)
    assert torch.equal(held["model.model.lm_head.weight"], policy.model.lm_head.weight.full_tensor())
    assert torch.equal(held["optimizer.step"], updater.state()["optimizer.step"])
    assert held["random.cpu.0"].dtype == torch.uint8
