"""From a run folder to numbers, a page and words; and what is refused."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from asyncrl.errors import ConfigError
from asyncrl.learner.dump import read
from asyncrl.lens.look import Look, look
from asyncrl.lens.report import write
from asyncrl.metrics.sink import to_line
from asyncrl.process import role_environment
from tests.helpers.dumped_run import settings, train
from tests.helpers.tiny_models import qwen3_dense


@pytest.fixture(scope="module")
def seen(run):
    return look(Look(run))


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def test_the_drift_computed_again_equals_the_logged_one_exactly(seen):
    numbers, pool = seen
    assert numbers["sanity"] == {
        "responses": 40, "max_difference": 0.0,
        "text": "the drift computed again under the policy of each dump equals the logged drift exactly, over 40 "
        "responses of 2 dumps",
    }  # fmt: skip
    assert [d["max_difference"] for d in numbers["dumps"]] == [0.0, 0.0]
    assert [d["update"] for d in numbers["dumps"]] == [0, 2]
    assert len(pool) == 40 and numbers["notes"] == []


def test_another_policy_gives_another_drift(seen, run):
    numbers, pool = seen
    assert numbers["against"] == ["final"]
    final, _ = pool.against["final"]
    assert not np.array_equal(final, pool.drift)
    # A dump of update 2 under the policy of update 2 is the dump under its own.
    _, again = look(Look(run, updates=(2,), against=("2", "0")))
    assert np.array_equal(again.against["2"][0], again.drift, equal_nan=True)
    assert not np.array_equal(again.against["0"][0], again.drift, equal_nan=True)
    (two, zero) = numbers_of(run, ("2", "start"))["usage"]
    assert [line["total_variation"] for line in two["layers"]] == [0, 0]
    assert all(line["total_variation"] > 0 for line in zero["layers"])


def numbers_of(run, against, updates=(2,)):
    return look(Look(run, updates=updates, against=against))[0]


def test_experts_are_compared_token_by_token_where_routes_were_kept(seen, start, world, tmp_path):
    numbers, _ = seen
    between = [pair["between"] for pair in numbers["agreement"]]
    assert between == [["rollout", "own"], ["rollout", "final"], ["own", "final"]]
    own_final = numbers["agreement"][2]
    assert own_final["tokens"] == numbers["agreement"][0]["tokens"] > 100
    # The rollout's routes are random here, the policies are relatives.
    assert own_final["equal_sets"] > 0.3 > numbers["agreement"][0]["equal_sets"]
    config = settings(tmp_path / "counts", start)
    train(config, world, 1, full_routes=False)
    found = numbers_of(config.run_dir, ("final",), ())
    assert [pair["between"] for pair in found["agreement"]] == [["own", "final"]]
    assert found["sanity"]["max_difference"] == 0


def test_age_is_from_the_weights_that_sampled(seen):
    numbers, pool = seen
    for dump in numbers["dumps"]:
        sampled = dump["update"] - pool.lag[pool.update == dump["update"]].mean()
        assert dump["age"] == {"final": pytest.approx(4 - sampled)}
    assert numbers["dumps"][1]["lag"] > 0


def test_without_policies_the_logged_drift_stands(copy):
    for folder in (copy / "dumps").iterdir():
        shutil.rmtree(folder / "policy")
    shutil.rmtree(copy / "model")
    numbers, pool = look(Look(copy))
    assert numbers["against"] == ["start"]
    assert (
        "there is no policy of update 0, 2" in numbers["notes"][0] and "logging.dump_policy=true" in numbers["notes"][0]
    )
    assert numbers["usage"] == [] and np.isnan(numbers["sanity"]["max_difference"])
    logged = np.concatenate([read(copy / "dumps" / u).table["drift"] for u in ("u0", "u2")])
    assert np.array_equal(pool.drift, logged, equal_nan=True)


def test_what_a_resumed_learner_undid_is_left_out_and_noted(start, world, tmp_path):
    config = settings(tmp_path / "resumed", start, learner={"updates": 6})
    train(config, world, 5)  # dumps of 0, 2 and 4; then it went on from a checkpoint of update 2 ...
    train(config, world, 4, first=2, epoch=1)  # ... and is at update 4 now
    numbers, _ = look(Look(config.run_dir))
    assert [(d["update"], d["epoch"]) for d in numbers["dumps"]] == [(0, 0), (2, 1)]
    assert numbers["notes"] == [
        "the dump of update 4 is of run epoch 0, which a later learner undid; it is left out, --update takes it in"
    ]
    assert numbers["sanity"]["max_difference"] == 0
    named, _ = look(Look(config.run_dir, updates=(4,)))
    assert [d["update"] for d in named["dumps"]] == [4]
    assert "undid" in named["notes"][0] and "--update" not in named["notes"][0]


def test_a_run_whose_dumps_are_all_undone_says_so(copy):
    with (copy / "metrics.jsonl").open("a") as lines:
        lines.write(to_line(0, 0.0, {"run/epoch": 1.0}) + "\n")
    with pytest.raises(ConfigError, match="only dumps that a later learner undid; name one with --update"):
        look(Look(copy))


def test_a_dense_model_is_refused(world, tmp_path):
    qwen3_dense(hidden=16).save_pretrained(tmp_path / "dense")
    off = {"algorithm": {"rdc": {"mode": "off"}}}
    config = settings(tmp_path / "run", tmp_path / "dense", **off)
    train(config, world, 1)
    with pytest.raises(ConfigError, match=r"u0: .*dense.* is a dense model, nothing routes there.*mismatch/\*"):
        look(Look(config.run_dir))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda run: (run / "config.yaml").unlink(), r"is no run folder: it has no config.yaml"),
        (lambda run: shutil.rmtree(run / "dumps"), r"has no dump: run with logging.dump_every=10"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_remedy(change, words, copy):
    change(copy)
    with pytest.raises(ConfigError, match=words):
        look(Look(copy))


def test_what_is_not_there_is_refused_with_what_is(run):
    with pytest.raises(ConfigError, match=r"has no dump of update 3; it has 0, 2$"):
        look(Look(run, updates=(3,)))
    with pytest.raises(ConfigError, match=r"has no policy of step '7'; it has start, 0, 2, final\. Dumps hold"):
        look(Look(run, against=("7",)))
    with pytest.raises(ConfigError, match=r"'nowhere' has no config.json; give where it lies now as --model"):
        look(Look(run, against=("start",), model="nowhere"))


def test_the_page_is_whole_in_itself(run, tmp_path):
    written = write(Look(run, against=("0", "final")), tmp_path / "out")
    html = written.page.read_text()
    pictures = re.findall(r'src="([^"]{30})', html)
    assert len(pictures) == 10
    assert all(p.startswith("data:image/png;base64,") for p in pictures)
    assert not re.search(r"https?://|<script|<link|url\(|@import", html)
    assert "equals the logged drift exactly" in html
    assert json.loads((tmp_path / "out" / "numbers.json").read_text()) == json.loads(written.text)
    assert "NaN" not in written.text
    for file in (tmp_path / "out").glob("*.png"):
        assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 5000


@pytest.mark.timeout(400)
def test_the_command_reports(run, tmp_path):
    command = [sys.executable, "-m", "asyncrl", "drift", run, "--out", tmp_path / "out", "--q", "0.5", "--buckets", "2"]
    env = {**role_environment(1), "ASYNCRL_ENV": "1"}
    done = subprocess.run([*command, "--json"], env=env, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    numbers = json.loads(done.stdout)
    assert [(w["q"], w["buckets"]) for w in numbers["what_if"]] == [(0.25, 2), (0.5, 2)]
    assert numbers["sanity"]["max_difference"] == 0
    refused = subprocess.run([*command, "--update", "1"], env=env, capture_output=True, text=True, timeout=300)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "has no dump of update 1; it has 0, 2" in refused.stderr


def test_a_damaged_dump_is_left_out_with_a_note_and_the_others_are_reported(copy):
    (copy / "dumps" / "u2" / "table.safetensors").write_bytes(b"broken")
    numbers, pool = look(Look(copy, against=("final",)))
    assert [d["update"] for d in numbers["dumps"]] == [0] and len(pool) == 20
    (note,) = numbers["notes"]
    assert "left out" in note and "u2/table.safetensors is damaged" in note and "use another dump" in note
    # Its head as well: nothing is known of it then, its policy is none to compare with.
    (copy / "dumps" / "u2" / "dump.json").write_text("{")
    numbers, _ = look(Look(copy, against=("final",)))
    assert "u2/dump.json is damaged" in numbers["notes"][0]
    (copy / "dumps" / "u0" / "rank0.groups").unlink()
    with pytest.raises(ConfigError, match=r"u0/rank0.groups cannot be read"):
        look(Look(copy, against=("final",)))
