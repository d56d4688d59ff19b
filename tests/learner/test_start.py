"""Where a learner begins, and as which run epoch."""

from types import SimpleNamespace

import pytest
import torch

from asyncrl.config import validate
from asyncrl.learner.checkpoint import Progress
from asyncrl.learner.loop import Learner
from asyncrl.learner.shard import World
from asyncrl.learner.start import begin, evaluated, model_fingerprint
from asyncrl.metrics.sink import Sink
from asyncrl.types import ModelInfo
from asyncrl.wire import Welcome

WORLD = World(0, 1, torch.device("cpu"))


@pytest.mark.parametrize(
    ("found", "welcome", "expected"),
    [
        (None, Welcome(0, 0, None), Progress(0, 0, 0, 0.0)),
        # B31: live generators at 0.57, a checkpoint of update 50.
        (Progress(0, 50, 53, 0.5), Welcome(0, 58, (0, 57, "/w")), Progress(1, 50, 53, 0.5)),
        # The second learner died before it saved anything; its versions were published.
        (Progress(0, 50, 53, 0.5), Welcome(1, 52, (1, 52, "/w")), Progress(2, 50, 53, 0.5)),
        # Replay lost its snapshot, the learner knows more.
        (Progress(3, 50, 53, 0.5), Welcome(0, 0, None), Progress(4, 50, 53, 0.5)),
        # No checkpoint: the start model again, but not as versions that were published before.
        (None, Welcome(0, 7, (0, 6, "/w")), Progress(1, 0, 0, 0.0)),
        (None, Welcome(0, 0, (0, 0, "/w")), Progress(1, 0, 0, 0.0)),
    ],
)
def test_every_later_learner_is_a_new_epoch_above_all_that_was_published(found, welcome, expected):
    assert begin(found, welcome, WORLD) == expected


def test_beginning_again_without_a_checkpoint_is_said(caplog):
    begin(None, Welcome(2, 7, (2, 6, "/w")), WORLD)
    assert "at update 7" in caplog.text and "again from model.path as run epoch 3" in caplog.text


def test_evaluations_that_are_recorded_already_are_known_by_version(tmp_path):
    assert evaluated(tmp_path) == set()
    with Sink(tmp_path, tensorboard=False) as sink:
        sink.write(0, {"policy/reward": 1.0, "run/epoch": 1.0})
        sink.write(4, {"eval/version": 4.0, "eval/epoch": 1.0})
    assert evaluated(tmp_path) == {"1.4"}


def test_the_fingerprint_knows_architecture_and_stored_precision_and_nothing_else():
    info = ModelInfo((0, 1), 8, 2, 32, "f00d")
    one, lr, bf16, fp64 = (
        validate({"model": {"path": "x", "dtype": dtype, "experts": "eager"}, "learner": {"lr": rate}})
        for dtype, rate in (("float32", 1e-3), ("float32", 1e-4), ("bfloat16", 1e-3), ("float64", 1e-3))
    )
    same = {model_fingerprint(c, info) for c in (one, lr, bf16)}
    others = {model_fingerprint(fp64, info), model_fingerprint(one, ModelInfo((0, 1), 8, 2, 32, "beef"))}
    assert len(same) == 1 and len(others) == 2 and not same & others


def test_a_learner_that_comes_after_the_last_update_trains_nothing():
    learner = Learner.__new__(Learner)
    done = []
    learner.over, learner.world = True, WORLD
    learner.checkpoints = SimpleNamespace(remove=lambda: done.append("removed"))
    learner.config = validate({"model": {"path": "x"}, "eval": {"timeout_s": 5}})
    learner.best = None
    learner.recorder = SimpleNamespace(wait_for_evaluations=lambda timeout_s: done.append(timeout_s))
    learner.run()
    assert done == ["removed", 35]


def test_a_learner_asks_replay_whether_the_run_is_over():
    learner = Learner.__new__(Learner)
    learner.world = WORLD
    for closed in (True, False):
        learner.client = SimpleNamespace(status=lambda closed=closed: {"closed": closed})
        assert learner._over() is closed
