"""A learner that goes on from a checkpoint makes the same updates, bit by bit, on any number of ranks."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncrl.config import validate
from asyncrl.errors import ConfigError
from asyncrl.learner.checkpoint import Checkpoints, Progress
from asyncrl.learner.shard import build_policy
from asyncrl.learner.step import Updater
from asyncrl.process import role_environment
from tests.helpers.tiny_models import qwen3_moe

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(900)
"""The first test waits for six runs of torchrun."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """States by (mode, world of the save, world of the load). Waits for each torchrun at most 240 s."""
    folder = tmp_path_factory.mktemp("checkpoint")
    qwen3_moe(hidden=32, layers=2, experts=8, top_k=2, vocab=64, seed=3).save_pretrained(folder / "model")
    base = folder / "base.yaml"
    base.write_text("model: {path: x, dtype: float64, experts: eager}\nalgorithm: {rdc: {q: 0.2}}\n")

    def start(world, mode, run_dir, out):
        done = subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world),
                str(ROOT / "tests/learner/checkpoint_worker.py"), str(folder / "model"), str(base), str(run_dir),
                str(out), mode,
            ],
            cwd=ROOT, env={**role_environment(1), "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
            timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        return torch.load(out, weights_only=True)

    out = {}
    for world in (1, 2):
        run_dir = folder / f"run{world}"
        out["save", world] = start(world, "save", run_dir, folder / f"save{world}.pt")
        for other in (1, 2):
            out["load", world, other] = start(other, "load", run_dir, folder / f"load{world}{other}.pt")
    return out


def assert_equal(one, two):
    assert one.keys() == two.keys() and len(one) > 60
    for name in one:
        assert torch.equal(one[name], two[name]), name


@pytest.mark.parametrize("world", [1, 2])
def test_three_updates_after_a_checkpoint_equal_three_without_one_bit_by_bit(runs, world):
    saved, loaded = runs["save", world], runs["load", world, world]
    assert_equal(saved["states"][0], loaded["states"][0])
    assert_equal(saved["states"][1], loaded["states"][1])
    assert saved["carry"] == loaded["carry"]
    assert saved["states"][1]["optimizer.step"].tolist() == [6.0] * len(saved["states"][1]["optimizer.step"])
    assert not torch.equal(*(s["model.lm_head.weight"] for s in saved["states"]))


@pytest.mark.parametrize("before", [1, 2])
def test_another_number_of_ranks_goes_on_from_the_same_numbers(runs, before):
    saved, loaded = runs["save", before], runs["load", before, 3 - before]
    assert_equal(saved["states"][0], loaded["states"][0])
    for name, tensor in saved["states"][1].items():
        torch.testing.assert_close(loaded["states"][1][name], tensor, rtol=0, atol=1e-9)


@pytest.fixture(scope="module")
def made(model_dir, world):
    settings = validate({"model": {"path": model_dir}})
    policy = build_policy(model_dir, "float32", "sdpa", settings.model.experts, 64, False, world)
    return policy, Updater(policy, settings.learner, settings.algorithm, world)


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


def test_a_file_that_cannot_be_read_back_costs_the_checkpoint(made, checkpoints, tmp_path, caplog):
    # A link to nowhere, beside the tensors.
    aside = tmp_path / "checkpoints" / "u2.part"
    aside.mkdir(parents=True)
    (aside / "lost").symlink_to("nowhere")
    assert not checkpoints.save(*made, Progress(0, 2, 2, 0.0))
    assert "u2 was not written" in caplog.text and "lost" in caplog.text
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_disk_that_refuses_costs_the_checkpoint_and_not_the_run(made, checkpoints, tmp_path, caplog):
    (tmp_path / "checkpoints").write_text("a file")
    assert not checkpoints.save(*made, Progress(0, 2, 2, 0.0))
    assert "u2 was not written" in caplog.text
