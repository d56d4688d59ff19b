"""A learner that goes on from a checkpoint makes the same updates, bit by bit, on any number of ranks."""

import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from asyncrl.errors import ConfigError
from asyncrl.learner.checkpoint import Checkpoints, Progress
from tests.helpers.ranks import free_port, run_ranks
from tests.helpers.tiny_models import qwen3_moe

WORKER = Path(__file__).with_name("checkpoint_worker.py")

pytestmark = pytest.mark.timeout(600)

BASE = """
model: {path: x, dtype: float64, experts: eager}
algorithm: {rdc: {q: 0.23}}
learner: {updates: 4, warmup_updates: 1, lr: 0.01, lr_schedule: cosine, min_lr: 0.001}
"""
R3 = ["algorithm.routes=r3", "model.dtype=float32", "learner.weight_decay=0.1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Results and exit statuses by the scenario's name (checkpoint_worker.py)."""
    folder = tmp_path_factory.mktemp("checkpoint")
    qwen3_moe(hidden=16, layers=2, experts=32, top_k=2, vocab=32, seed=3).save_pretrained(folder / "model")
    (folder / "base.yaml").write_text(BASE)
    phases = {"save": {}, "load": {}, "killed": {}, "after": {}}

    def scenario(phase, name, world, run, **more):
        out = str(folder / f"{name}.pt")
        shared = {"model": str(folder / "model"), "base": str(folder / "base.yaml"), "run": str(folder / run)}
        phases[phase][name] = {"world": world, "port": free_port(), "out": out, "to": 4} | shared | more

    for key, world, overrides in (("native1", 1, []), ("native2", 2, []), ("r3", 2, R3)):
        scenario("save", f"straight-{key}", world, f"straight-{key}", overrides=overrides)
        scenario("save", f"save-{key}", world, f"run-{key}", overrides=overrides, save=[2])
        scenario("load", f"load-{key}", world, f"run-{key}", overrides=overrides, load=True)
    for before in (1, 2):
        scenario("load", f"other-{before}", 3 - before, f"run-native{before}", load=True)
    scenario("save", "full", 2, "full", save=[1, 2, 3], keep=1, background=False, faults={"full": 2})
    scenario("killed", "killed", 2, "killed", save=[1, 3], faults={"kill": 3})
    scenario("after", "after-kill", 2, "killed", load=True, faults={"blind": True})
    codes, said, results = {}, "", {}
    for phase, specs in phases.items():
        # What goes on from a checkpoint does so in new processes.
        file = folder / f"{phase}.json"
        file.write_text(json.dumps(list(specs.values())))
        ended = run_ranks(WORKER, 2, folder, file)
        said += ended.said
        codes |= {name: ended.codes[: spec["world"]] for name, spec in specs.items()}
        outs = {name: spec["out"] for name, spec in specs.items() if Path(spec["out"]).exists()}
        results |= {name: torch.load(out, weights_only=True) for name, out in outs.items()}
    return SimpleNamespace(folder=folder, codes=codes, results=results, log=said)


def result(runs, name):
    assert set(runs.codes[name]) == {0}, (name, runs.codes[name], runs.log[-4000:])
    return runs.results[name]


def assert_equal(one, two):
    assert one.keys() == two.keys() and len(one) > 60
    for name in one:
        assert torch.equal(one[name], two[name]), name


@pytest.mark.parametrize("key", ["native1", "native2", "r3"])
def test_four_updates_equal_two_a_checkpoint_and_two_more_bit_by_bit(runs, key):
    straight, saved, loaded = (result(runs, f"{what}-{key}") for what in ("straight", "save", "load"))
    assert saved["saved"] == [True] and (loaded["from"], loaded["newest"]) == (2, 2)
    assert saved["sealed_at"].get(2, 4) > 2, "it was not written while updates ran"
    # Saving changes nothing, and nothing of the updates that ran meanwhile got into the checkpoint.
    assert_equal(straight["end"], saved["end"])
    assert_equal(straight["end"], loaded["end"])
    assert loaded["carries"] == straight["carries"][2:] and any(loaded["carries"])
    assert loaded["lr"] == straight["lr"][2:] and len(set(straight["lr"])) == 4
    assert loaded["random"] == saved["random"][2:]
    assert straight["end"]["optimizer.step"].tolist() == [4.0] * len(straight["end"]["optimizer.step"])


def test_among_the_saved_experts_there_was_one_that_never_saw_a_token(runs):
    # Recorded routes are random and reach all of them; those of the model itself do not.
    end = result(runs, "load-native2")["end"]
    moments = [t for n, t in end.items() if "exp_avg_sq" in n and "experts" in n]
    assert any((m == 0).flatten(1).all(1).any() for m in moments)


@pytest.mark.parametrize("before", [1, 2])
def test_another_number_of_ranks_goes_on_from_the_same_numbers(runs, before):
    same, other = result(runs, f"load-native{before}"), result(runs, f"other-{before}")
    assert_equal(same["loaded"], other["loaded"])
    for name, tensor in same["end"].items():
        torch.testing.assert_close(other["end"][name], tensor, rtol=0, atol=1e-9)


def test_a_full_disk_on_one_rank_costs_the_checkpoint_and_nothing_else(runs):
    full = result(runs, "full")
    assert (full["saved"], full["failures"], full["newest"]) == ([True, False, True], 1, 3)
    assert_equal(full["end"], result(runs, "straight-native2")["end"])
    assert "u2 was not written: [Errno 27] File too large" in runs.log
    assert [f.name for f in (runs.folder / "full" / "checkpoints").iterdir()] == ["u3"]


def test_a_rank_that_is_killed_in_a_save_leaves_the_checkpoint_before_and_rank_0_alone_decides_what_there_is(runs):
    assert runs.codes["killed"][1] == -signal.SIGKILL and runs.codes["killed"][0] != 0
    after = result(runs, "after-kill")
    assert after["from"] == 1
    for name, tensor in result(runs, "straight-native2")["end"].items():
        assert torch.equal(after["end"][name], tensor), name
    assert [f.name for f in (runs.folder / "killed" / "checkpoints").iterdir()] == ["u1"]


@pytest.fixture
def checkpoints(tmp_path, world):
    return Checkpoints(tmp_path, "f", 2, world)


def test_the_newest_are_kept_and_the_newest_is_found(made, checkpoints, tmp_path):
    assert checkpoints.load(*made) is None
    for update in (2, 4, 10):
        assert checkpoints.save(*made, Progress(0, update, update + 1, 0.3))
    assert sorted(f.name for f in (tmp_path / "checkpoints").iterdir()) == ["u10", "u4"]
    assert checkpoints.load(*made) == Progress(0, 10, 11, 0.3)
    # The next run epoch went back to update 4 and came to 6: that is newer than update 10 of the one before.
    assert checkpoints.save(*made, Progress(1, 6, 7, 0.1 + 0.2))
    assert checkpoints.load(*made) == Progress(1, 6, 7, 0.1 + 0.2)
    checkpoints.remove()
    assert checkpoints.load(*made) is None


def test_what_was_not_finished_is_removed_and_not_read(made, checkpoints, tmp_path):
    checkpoints.save(*made, Progress(0, 2, 2, 0.0))
    left = tmp_path / "checkpoints" / "u4.part"
    shutil.copytree(tmp_path / "checkpoints" / "u2", left)
    assert checkpoints.load(*made).update == 2
    assert not left.exists()


def damage(file):
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def test_one_flipped_bit_leads_to_the_older_checkpoint_with_a_warning(made, checkpoints, tmp_path, caplog):
    for update in (2, 4):
        checkpoints.save(*made, Progress(0, update, update, 0.0))
    (broken,) = (tmp_path / "checkpoints" / "u4").glob("*.safetensors")
    damage(broken)
    with torch.no_grad():
        made[0].model.lm_head.weight.zero_()
    assert checkpoints.load(*made).update == 2
    assert f"{broken} is damaged" in caplog.text and "u2 is used" in caplog.text
    assert bool(made[0].model.lm_head.weight.full_tensor().any())
    # The damaged one is out of the way: it does not count as one of the two that are kept.
    checkpoints.save(*made, Progress(1, 6, 6, 0.0))
    assert sorted(f.name for f in (tmp_path / "checkpoints").iterdir()) == ["u2", "u4.damaged", "u6"]


@pytest.mark.parametrize("how", ["flip", "cut", "gone", "state"])
def test_without_another_one_a_damaged_checkpoint_is_refused_by_name(made, checkpoints, tmp_path, how):
    checkpoints.save(*made, Progress(0, 2, 2, 0.0))
    folder = tmp_path / "checkpoints" / "u2"
    (file,) = folder.glob("*.safetensors")
    if how == "flip":
        damage(file)
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "gone":
        file.unlink()
    else:
        file = folder / "state.json"
        file.write_text('{"format":1}')
    with pytest.raises(ConfigError, match=f"{file}.*remove {tmp_path / 'checkpoints'}"):
        checkpoints.load(*made)


def test_a_checkpoint_of_another_model_is_refused(made, checkpoints, tmp_path, world):
    checkpoints.save(*made, Progress(0, 2, 2, 0.0))
    with pytest.raises(ConfigError, match=r"another model, model\.dtype or asyncrl.*another run\.name"):
        Checkpoints(tmp_path, "g", 2, world).load(*made)


def test_what_is_not_finite_is_not_saved(made, checkpoints, tmp_path, caplog):
    checkpoints.save(*made, Progress(0, 2, 2, 0.0))
    weight = made[0].model.lm_head.weight.to_local()
    with torch.no_grad():
        kept = weight[0, 0].clone()
        weight[0, 0] = float("nan")
        assert not checkpoints.save(*made, Progress(0, 4, 4, 0.0))
        weight[0, 0] = kept
    assert "model.model.lm_head.weight is not finite" in caplog.text
    assert checkpoints.load(*made).update == 2


def test_a_checkpoint_holds_no_pickle(made, checkpoints, tmp_path):
    checkpoints.save(*made, Progress(0, 2, 2, 0.0))
    files = sorted(f.name for f in (tmp_path / "checkpoints" / "u2").iterdir())
    assert [f.rpartition(".")[2] for f in files] == ["safetensors", "json"]
    assert set(json.loads((tmp_path / "checkpoints" / "u2" / "state.json").read_text())["files"]) == {files[0]}


def test_a_checkpoint_that_cannot_be_sealed_leaves_nothing_that_fills_the_disk(made, checkpoints, tmp_path, caplog):
    checkpoints.save(*made, Progress(0, 2, 2, 0.0))
    folder = tmp_path / "checkpoints"
    (folder / "u4").write_text("a file where its name must go")
    assert not checkpoints.save(*made, Progress(0, 4, 4, 0.0))
    assert "u4 was not written" in caplog.text
    assert sorted(f.name for f in folder.iterdir()) == ["u2", "u4"]


def test_a_disk_that_refuses_costs_the_checkpoint_and_not_the_run(made, checkpoints, tmp_path, caplog):
    (tmp_path / "checkpoints").write_text("a file")
    assert not checkpoints.save(*made, Progress(0, 2, 2, 0.0))
    assert "u2 was not written" in caplog.text


def test_while_an_alarm_builds_up_the_checkpoint_before_it_stays(made, checkpoints, tmp_path):
    for update in (2, 4, 6):
        checkpoints.save(*made, Progress(0, update, update, 0.0))
    checkpoints.suspect = 5
    for update in (8, 10):
        checkpoints.save(*made, Progress(0, update, update, 0.0))
    names = {f.name for f in (tmp_path / "checkpoints").iterdir()}
    assert names == {"u4", "u8", "u10"}  # two are kept, and the one from before update 5
    checkpoints.suspect = None
    checkpoints.save(*made, Progress(0, 12, 12, 0.0))
    assert {f.name for f in (tmp_path / "checkpoints").iterdir()} == {"u10", "u12"}


def test_an_alarm_that_ends_the_run_leads_back_before_its_first_bad_update(made, checkpoints, tmp_path, world):
    for update in (2, 4):
        checkpoints.save(*made, Progress(0, update, update, 0.0))
    assert checkpoints.begin(*made, Progress(0, 6, 6, 0.0))  # being written: never complete
    checkpoints.go_back(4)
    assert str(checkpoints).endswith("u2") and checkpoints.pending is None
    assert (tmp_path / "checkpoints" / "u4.alarm" / "state.json").exists()
    again = Checkpoints(tmp_path, "f", 2, world)
    assert again.load(*made) == Progress(0, 2, 2, 0.0)
    again.go_back(0)
    assert str(again) == "none" and Checkpoints(tmp_path, "f", 2, world).load(*made) is None


def test_an_older_checkpoint_that_is_being_written_is_still_completed(made, checkpoints, tmp_path):
    assert checkpoints.begin(*made, Progress(0, 6, 6, 0.0))
    checkpoints.go_back(7)
    assert checkpoints.newest == 6 and (tmp_path / "checkpoints" / "u6").is_dir()
