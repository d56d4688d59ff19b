"""Dumps of takes of several updates: with what the scoring pass of the take found, an update of it is made again."""

from dataclasses import replace

import numpy as np
import pytest

from asyncrl.learner.dump import FORMAT, HEAD, read, routes_file, scores_file
from asyncrl.learner.rescore import policy_of, rescore, rows_of_rank, take_state
from asyncrl.learner.update import run_update
from asyncrl.lens.look import Look, logged, look
from tests.helpers.dumped_run import groups_of, settings, train
from tests.learner.takes import Spy, renamed


def take_groups(info, update, full_routes=True):
    return renamed(groups_of(info, update, full_routes), update)


METHODS = {
    "r2": {"routes": "r2"},
    "rspo": {"correction": {"kind": "rspo"}},
    "r2 rspo": {"routes": "r2", "correction": {"kind": "rspo"}},
    "r3 rspo": {"routes": "r3", "correction": {"kind": "rspo"}},
    "native": {},
}


@pytest.fixture(scope="module")
def dumped(model_dir, world, tmp_path_factory):
    """By method a run of one take of three updates with dumps of 0 and 2, and its outcomes."""
    found = {}
    for name, algorithm in METHODS.items():
        config = settings(
            tmp_path_factory.mktemp("r2") / "run", model_dir, algorithm={"rdc": {"q": 0.25}} | algorithm,
            staleness={"updates_per_take": 3, "max_lag": 8}, learner={"updates": 3, "lr": 0.01, "warmup_updates": 0},
        )  # fmt: skip
        found[name] = config, train(config, world, 3, taken=3, make=take_groups)[0]
    return found


@pytest.mark.parametrize("name", METHODS)
def test_an_update_late_in_a_take_is_made_again_from_its_dump(dumped, world, name):
    config, outcomes = dumped[name]
    dump = read(config.run_dir / "dumps" / "u2")
    assert dump.head.format == FORMAT
    assert (dump.routes is None) == (name == "native") and (dump.scores is None) == ("rspo" not in name)
    state = take_state(dump)
    assert all(t.forced == ("r2" in name) for t in state.routes.values())
    again = made_again(dump, state, world)
    assert (again.step.loss, again.step.grad_norm) == (outcomes[2].step.loss, outcomes[2].step.grad_norm)
    assert again.table.columns.keys() == dump.table.columns.keys()
    for column in dump.table.columns:
        np.testing.assert_array_equal(again.table[column], dump.table[column], err_msg=column)
    if name != "native":
        # Without what the take's scoring pass found of its routers it is another update.
        other = made_again(dump, replace(state, routes={}), world)
        assert other.step.grad_norm != outcomes[2].step.grad_norm


def made_again(dump, state, world):
    policy = policy_of(dump, dump.policy, world)
    updater = Spy(policy, dump.config.learner, dump.config.algorithm, world)
    rows = rows_of_rank(dump, 0)
    return run_update(policy, updater, rows, 2, dump.head.carry, state, dump.config, dump.info, world)


def test_a_dump_of_the_format_before_is_still_read(dumped, tmp_path):
    config, _ = dumped["native"]
    folder = config.run_dir / "dumps" / "u2"
    head = (folder / HEAD).read_text()
    assert f'"format": {FORMAT}' in head and FORMAT == 3
    old = tmp_path / "u2"
    old.mkdir()
    for file in folder.iterdir():
        if file.is_file():
            (old / file.name).write_bytes(file.read_bytes())
    (old / HEAD).write_text(head.replace('"format": 3', '"format": 2'))
    dump = read(old)
    assert dump.routes is dump.scores is None
    assert take_state(dump).routes == {}


def test_files_of_a_dump_are_there_where_they_are_needed(dumped):
    for name, (config, _) in dumped.items():
        files = {f.name for f in (config.run_dir / "dumps" / "u2").iterdir()}
        assert (routes_file(0) in files) == (name != "native"), name
        assert (scores_file(0) in files) == ("rspo" in name), name


def test_the_lens_takes_the_native_drift_of_r2_and_finds_it_again(dumped, world):
    config, _ = dumped["r2"]
    dump = read(config.run_dir / "dumps" / "u2")
    assert np.array_equal(logged(dump), dump.table["native_drift"], equal_nan=True)
    native = rescore(policy_of(dump, dump.policy, world), dump, world)
    assert np.array_equal(native.drift, dump.table["native_drift"], equal_nan=True)
    assert not np.array_equal(native.drift, dump.table["drift"], equal_nan=True)
    numbers, _ = look(Look(config.run_dir))
    assert numbers["sanity"]["max_difference"] == 0.0 and numbers["sanity"]["responses"] == 40
    # Nobody measured it: the drift of forced routes is not taken for it.
    unmeasured = replace(dump.table, columns={k: v for k, v in dump.table.columns.items() if k != "native_drift"})
    assert logged(replace(dump, table=unmeasured)) is None
    # The only batch of a take was natively routed.
    assert logged(replace(dump, table=unmeasured, routes=None)) is dump.table["drift"]
