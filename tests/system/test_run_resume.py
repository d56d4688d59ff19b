"""A run is killed and stopped on its way and resumed: at its end every prompt of the epoch was trained once."""

import json
import signal

from asyncrl.metrics.sink import timeline
from asyncrl.replay.journal import surviving
from tests.system.test_supervision import assert_books

EPOCH = 32
"""Updates of one data epoch, 4 prompts in each: long enough that no stop comes after its end."""


def assert_one_epoch(run):
    """Each prompt once, each update once, in both books and in TensorBoard."""
    assert_books(run, EPOCH)
    assert len({c["group_id"] for c in surviving(run.committed())}) == 4 * EPOCH
    steps = [r for r in timeline(run.records()) if "policy/reward" in r]
    assert [r["update"] for r in steps] == list(range(EPOCH))
    assert steps[-1]["run/checkpoint_failures"] == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.folder / "tb"), size_guidance={"scalars": 0})
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("run/epoch")] == [(r["update"], r["run/epoch"]) for r in steps]
    return [r["run/epoch"] for r in steps]


def stop(run):
    """SIGTERM; the update at which the learner was, all of which is saved and committed."""
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.text()
    assert run.processes() == []
    (line,) = [x for x in run.text().splitlines() if "told to stop at update" in x and "learner-0" in x]
    at = int(line.partition("told to stop at update ")[2].split()[0])
    assert line.endswith(f"checkpoints/u{at}")
    assert f"to go on: asyncrl run {run.folder / 'config.yaml'} --resume" in run.output.read_text()
    assert surviving(run.committed())[-1]["update"] == at - 1
    return at


def assert_finished(run, at):
    assert run.wait(240) == 0, run.text()
    epochs = assert_one_epoch(run)
    newest = max(epochs)
    assert epochs[at:] == [newest] * (EPOCH - at) and set(epochs[:at]).isdisjoint({newest})
    assert not (run.folder / "checkpoints").exists() and (run.folder / "model").is_dir()
    lines = [json.loads(x) for x in (run.folder / "committed.jsonl").read_text().splitlines()]
    assert [x["rolled_back_to"] for x in lines if "rolled_back_to" in x][-1] == at


def test_a_run_that_was_stopped_goes_on_and_trains_every_prompt_of_the_epoch_once(start_run):
    # No checkpoint is due before the end: only the last one of the stop is there.
    changes = {
        "learner.updates": EPOCH,
        "task.train_size": 4 * EPOCH,
        "learner.checkpoint_every": 100,
        "eval.every": 0,
        "run.shutdown_s": 60,
    }
    run = start_run("stopped", **changes)
    run.wait_for(lambda: len(run.updates()) >= 3)
    at = stop(run)
    again = start_run("stopped", resume=True, **{"learner.lr": 1e-4})
    assert_finished(again, at)
    assert "learner.lr: 0.0003 -> 0.0001" in again.output.read_text()
