"""`asyncrl run --resume` before anything starts: which folder, what is refused and why, what may change."""

import fcntl
import shutil
from pathlib import Path

import msgspec
import pytest

from asyncrl.config import load_config, save_config, validate
from asyncrl.errors import ConfigError
from asyncrl.learner.stored import State
from asyncrl.replay.evals import Evaluations
from asyncrl.replay.knobs import Knobs
from asyncrl.replay.snapshot import SnapshotFile, fingerprint
from asyncrl.replay.untune import FILE, done, order, ordered
from asyncrl.resume import differences, located, own, resumable
from asyncrl.types import ModelInfo
from tests.replay.support import MODEL, make_queue


def config_of(folder, **sections):
    tree = {"model": {"path": "m"}, "run": {"dir": str(folder.parent), "name": folder.name}, "learner": {"updates": 8}}
    for section, values in sections.items():
        tree[section] = tree.get(section, {}) | values
    return validate(tree)


def write_snapshot(config, done=False, tuned=()):
    queue = make_queue()
    queue.knobs = Knobs(config)
    for values in tuned:
        queue.knobs.change(values, "me", "", 3, 100.0)
    SnapshotFile(config.run_dir, fingerprint(config, MODEL)).write(
        queue=queue.save(), evaluations=Evaluations([], queue.tally, every=0).save(), restarts=0, source="",
        generators=[], done=done, journal_bytes=0,
    )  # fmt: skip


def write_checkpoint(folder, update):
    checkpoint = folder / "checkpoints" / f"u{update}"
    checkpoint.mkdir(parents=True)
    progress = {"epoch": 0, "update": update, "batches": update, "carry": 0.0}
    state = msgspec.convert({"format": 1, "fingerprint": "f", "progress": progress, "files": {}}, State)
    (checkpoint / "state.json").write_bytes(msgspec.json.encode(state))


@pytest.fixture
def run(tmp_path):
    """A run folder that was stopped after update 4."""
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    config = config_of(folder)
    save_config(config, folder / "config.yaml")
    write_snapshot(config)
    write_checkpoint(folder, 4)
    return folder


def test_an_unchanged_config_is_resumed_and_nothing_is_written(run):
    before = sorted(f.name for f in run.iterdir())
    assert resumable(config_of(run), MODEL) == []
    assert sorted(f.name for f in run.iterdir()) == before


def test_what_may_change_is_said_and_the_roles_get_it(run):
    new = config_of(run, learner={"updates": 12, "lr": 1e-5, "ranks": 2}, staleness={"max_lag": 5})
    assert sorted(resumable(new, MODEL)) == [
        "learner.lr: 0.0003 -> 1e-05", "learner.ranks: 1 -> 2", "learner.updates: 8 -> 12", "staleness.max_lag: 8 -> 5"
    ]  # fmt: skip
    assert load_config(run / "config.yaml") == new and load_config(run / "config-1.yaml") == config_of(run)
    resumable(config_of(run, learner={"updates": 13}), MODEL)
    assert load_config(run / "config-2.yaml") == new


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"task": {"train_size": 7}}, r"task\.train_size=7 was \d+, and cannot change within a run"),
        ({"run": {"seed": 5}}, r"run\.seed=5 was 0, and cannot change"),
        ({"algorithm": {"group_size": 4}}, r"algorithm\.group_size=4 was 8, and cannot change"),
        ({"learner": {"updates": 7}}, r"learner\.updates=7 was 8: a run may get longer, not shorter"),
        ({"model": {"dtype": "float64", "experts": "eager"}}, r"model\.dtype=float64 was \w+, and cannot change"),
    ],
)
def test_what_cannot_change_is_refused_by_key_and_nothing_is_written(run, sections, words):
    with pytest.raises(ConfigError, match=words + r".*another run\.name"):
        resumable(config_of(run, **sections), MODEL)
    assert not (run / "config-1.yaml").exists()


def test_another_model_is_refused_before_anything_starts(run):
    with pytest.raises(ConfigError, match=r"replay\.snapshot is of a run with another model"):
        resumable(config_of(run), ModelInfo(MODEL.layers, MODEL.num_experts, MODEL.top_k, MODEL.vocab_size, "beef"))


def test_nothing_to_resume_is_said_with_the_reason(run):
    with pytest.raises(ConfigError, match=r"nothing to resume: .*other has no config\.yaml"):
        resumable(config_of(run.with_name("other")), MODEL)
    shutil.rmtree(run / "checkpoints")
    assert resumable(config_of(run), MODEL) == ["there is no checkpoint yet: training begins again from model.path"]
    (run / "replay.snapshot").unlink()
    with pytest.raises(ConfigError, match="it has neither checkpoints nor a snapshot"):
        resumable(config_of(run), MODEL)
    (run / "model").mkdir()
    with pytest.raises(ConfigError, match="it made its last update, and model/ is there"):
        resumable(config_of(run), MODEL)


def test_a_run_that_made_its_last_update_cannot_get_longer(run):
    write_snapshot(config_of(run), done=True)
    assert resumable(config_of(run), MODEL) == []
    with pytest.raises(ConfigError, match=r"learner\.updates cannot become 9 any more; set it back to 8"):
        resumable(config_of(run, learner={"updates": 9}), MODEL)


def test_without_its_snapshot_it_is_said_that_prompts_come_again(run):
    (run / "replay.snapshot").unlink()
    assert resumable(config_of(run), MODEL) == [
        "replay.snapshot is gone: every prompt is given out again, from the first"
    ]


@pytest.mark.parametrize("name", ["metrics.lock", "replay.lock"])
def test_a_run_that_is_going_on_is_refused(run, name):
    with (run / name).open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=f"in use: a process holds {name}"):
            resumable(config_of(run), MODEL)
    assert resumable(config_of(run), MODEL) == []


def test_a_moved_run_is_found_where_its_config_lies(run, monkeypatch):
    moved = run.parents[1] / "elsewhere" / "copy"
    shutil.copytree(run, moved)
    config = load_config(moved / "config.yaml")
    assert config.run_dir == run
    assert located(config, [str(moved / "config.yaml")]).run_dir == moved
    monkeypatch.chdir(moved)
    assert located(config, ["config.yaml"]).run_dir == moved
    # A file that only has the name, and one with another, say nothing of a folder.
    (run.parents[1] / "config.yaml").write_text("{}")
    assert located(config, [str(run.parents[1] / "config.yaml"), str(Path("x.yaml"))]).run_dir == run
    assert resumable(located(config, [str(moved / "config.yaml")]), MODEL) == []


def test_differences_name_nested_keys(run):
    one, two = config_of(run), config_of(run, algorithm={"rdc": {"q": 0.5}}, run={"name": "x"})
    assert differences(one, two) == {"algorithm.rdc.q": (0.08, 0.5)}


def test_one_run_at_a_time_has_the_folder(run):
    with own(run), pytest.raises(ConfigError, match=r"in use: another `asyncrl run` holds run\.lock"):
        own(run)
    own(run).close()


LAG = "staleness.max_lag"


def test_what_is_tuned_is_said_and_a_key_that_is_named_is_that_of_the_config_again(run):
    config = config_of(run)
    write_snapshot(config, tuned=[{LAG: "16", "weights.paused": "true"}])
    said = [
        f"tuned, still in force: {LAG}=16 (config 8); it ends by: asyncrl tune RUN {LAG}=8",
        "tuned, still in force: weights.paused=true (config false); it ends by: asyncrl tune RUN weights.paused=false",
    ]
    assert sorted(resumable(config, MODEL)) == said
    assert not (run / FILE).exists()
    # The values of the config of before: nothing differs, but they were asked for.
    again = [f"no longer tuned: {LAG}: 16 -> 8"]
    assert sorted(resumable(config, MODEL, ["learner.updates=8", f"{LAG}=8"])) == [*again, said[1]]
    assert ordered(run) == {LAG}
    # Replay could not start: the order stands, and another is added to it.
    assert sorted(resumable(config, MODEL)) == [*again, said[1]]
    resumable(config, MODEL, ["weights={paused: false}"])
    assert ordered(run) == {LAG, "weights.paused"}
    assert not (run / "config-1.yaml").exists()


def test_a_resume_that_is_refused_orders_nothing(run):
    write_snapshot(config_of(run), tuned=[{LAG: "16"}])
    with pytest.raises(ConfigError, match="a run may get longer"):
        resumable(config_of(run, learner={"updates": 7}), MODEL, ["learner.updates=7", f"{LAG}=8"])
    assert not (run / FILE).exists()


def test_an_order_is_carried_out_once_and_a_damaged_one_is_none(run):
    order(run, ["a"])
    order(run, ["b"])
    assert ordered(run) == {"a", "b"}
    done(run)
    done(run)
    assert ordered(run) == set()
    for text in ("\0\0", "{", "3", "[1]"):
        (run / FILE).write_text(text)
        assert ordered(run) == set()
