"""Dumps: what an update trained on, written by all ranks and read back; damage is named and failure is not fatal."""

import json
import shutil
import struct
import subprocess
import sys
from dataclasses import asdict, replace

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from safetensors.numpy import load, save

from asyncrl.errors import ConfigError, WireError
from asyncrl.learner.dump import (
    HEAD,
    TABLE,
    content,
    groups_file,
    logp_file,
    named,
    pack_groups,
    read,
    unpack_groups,
)
from asyncrl.learner.rescore import policy_of, rescore, rollout_routes, rows_of_rank
from asyncrl.learner.step import Updater
from asyncrl.learner.update import TakeState, run_update
from asyncrl.metrics.names import is_known
from asyncrl.models.describe import describe
from asyncrl.models.folder import weights_of
from asyncrl.types import ModelInfo
from tests.helpers.dumped_run import groups_of, settings, train
from tests.helpers.ranks import free_port, run_ranks
from tests.learner.groups import make_groups

INFO = ModelInfo((0, 1), 8, 2, 64)


@pytest.fixture(scope="module")
def run(model_dir, world, tmp_path_factory):
    """Updates 0 to 2 on one rank, with dumps of 0 and 2; and what the updates gave."""
    config = settings(tmp_path_factory.mktemp("dumped") / "run", model_dir)
    return config, *train(config, world, 3)


def same(a, b):
    """Equal records, arrays included, NaN equal to itself."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    return a == b


def test_groups_go_into_a_file_and_back():
    groups = make_groups(INFO, 3, 2, seed=0)
    data = b"".join(bytes(part) for part in pack_groups(groups))
    assert same([asdict(g) for g in unpack_groups(data)], [asdict(g) for g in groups])
    assert unpack_groups(b"".join(map(bytes, pack_groups([])))) == []


def test_a_file_of_groups_that_is_cut_off_or_another_is_refused():
    data = b"".join(bytes(part) for part in pack_groups(make_groups(INFO, 2, 2, seed=0)))
    for end in (len(data) - 1, 20, 25, len(data) // 2):
        with pytest.raises(WireError, match="cut off"):
            unpack_groups(data[:end])
    with pytest.raises(WireError, match="does not begin"):
        unpack_groups(b"x" + data)
    huge = data[:17] + struct.pack("<IQ", 1, 2**60) + data[17:]
    with pytest.raises(WireError, match="cut off"):
        unpack_groups(huge)


def test_a_dump_holds_what_the_update_trained_on(run):
    config, outcomes, scalars = run
    assert list(named(config.run_dir)) == [0, 2]
    for update in (0, 2):
        dump, outcome = read(config.run_dir / "dumps" / f"u{update}"), outcomes[update]
        assert same([asdict(g) for g in dump.ranks[0]], [asdict(g) for g in groups_of(dump.info, update)])
        assert dump.table.names == outcome.table.names
        assert same(dict(sorted(dump.table.columns.items())), dict(sorted(outcome.table.columns.items())))
        for name in ("keep", "would_drop", "advantages"):
            assert np.array_equal(getattr(dump, name), getattr(outcome, name).numpy()), name
        assert np.array_equal(dump.bucket, outcome.selection.bucket.numpy())
        assert (dump.update, dump.head.outcome, dump.head.bound) == (update, "stepped", update - 8)
        assert dump.config == config
        assert dump.info == describe(config.model.path)
        assert dump.old_logp is None
        assert [bool(s) for s in scalars] == [True, False, True]
    assert not list((config.run_dir / "dumps").glob("*.part"))


def test_what_a_dump_cost_is_a_metric(run):
    config, _, scalars = run
    files = [f for f in (config.run_dir / "dumps" / "u2").rglob("*") if f.is_file()]
    assert scalars[2]["run/dump_bytes"] == sum(f.stat().st_size for f in files)
    assert scalars[2]["run/dump_s"] > 0
    assert scalars[2]["run/dump_failures"] == 0
    assert all(is_known(name) for name in scalars[2])


def test_an_update_is_made_again_from_its_dump(run, world):
    config, outcomes, _ = run
    dump = read(config.run_dir / "dumps" / "u2")
    policy = policy_of(dump, dump.policy, world)
    updater = Updater(policy, config.learner, config.algorithm, world)
    again = run_update(
        policy, updater, rows_of_rank(dump, 0), 2, dump.head.carry, None, dump.config, dump.info, world
    )  # fmt: skip
    assert same(dict(sorted(again.table.columns.items())), dict(sorted(dump.table.columns.items())))
    assert np.array_equal(again.keep.numpy(), dump.keep) and not dump.keep.all()
    assert (again.step.loss, again.step.grad_norm) == (outcomes[2].step.loss, outcomes[2].step.grad_norm)


def test_a_dump_holds_the_log_probs_that_the_update_computed(run, world):
    config, outcomes, _ = run
    dump = read(config.run_dir / "dumps" / "u2")
    assert dump.logp is not None and list(dump.logp) != [] and dump.logp.keys() == set(dump.table.ids)
    rows = rows_of_rank(dump, 0)
    for row, whole in zip(rows, outcomes[2].logp, strict=True):
        p, values = len(row.prompt_ids), dump.logp[row.trajectory.trajectory_id]
        assert np.array_equal(values, whole.numpy()[p - 1 : p - 1 + row.trajectory.num_tokens])
    # The table's mean was taken of the same numbers.
    ratio = [np.abs(dump.logp[r.trajectory.trajectory_id] - r.trajectory.logprobs)[r.loss_mask] for r in rows]
    means = [float(np.mean(r.astype(np.float64))) if r.size else 0.0 for r in ratio]
    assert means == pytest.approx(dump.table["abs_log_ratio"].tolist(), rel=1e-5)
    # Of an update that is not dumped, nothing is kept.
    assert [o.logp is None for o in outcomes] == [False, True, False]


def test_parts_of_the_reward_go_into_a_dump_and_back(run):
    groups = make_groups(INFO, 1, 2, seed=0)
    parts = tuple(replace(t, parts={"format": 0.5, "turns": 2.0}) for t in groups[0].trajectories)
    groups = [replace(groups[0], trajectories=parts)]
    (back,) = unpack_groups(b"".join(map(bytes, pack_groups(groups))))
    assert [t.parts for t in back.trajectories] == [{"format": 0.5, "turns": 2.0}] * 2


def as_written_before(folder):
    """Turn a dump into one of format 1, as it was before responses had parts and dumps had log-probs."""
    head = json.loads((folder / HEAD).read_text())
    data, at, out = (folder / groups_file(0)).read_bytes(), 17, [b"asyncrl groups 1\n"]
    while at < len(data):
        (count,) = struct.unpack_from("<I", data, at)
        sizes = struct.unpack_from(f"<{count}Q", data, at + 4)
        at += 4 + 8 * count
        frames = []
        for size in sizes:
            frames.append(data[at : at + size])
            at += size
        group = msgspec.msgpack.decode(frames[1])
        group[0], group[-2], group[-1] = 5, group[-2][:5], [t[:-1] for t in group[-1]]
        frames[1] = msgspec.msgpack.encode(group)
        out += [struct.pack("<I", count), *(struct.pack("<Q", len(f)) for f in frames), *frames]
    old = b"".join(out)
    (folder / groups_file(0)).write_bytes(old)
    (folder / logp_file(0)).unlink()
    del head["files"][logp_file(0)]
    # Nor was anything withheld then.
    table = save({k: v for k, v in load((folder / TABLE).read_bytes()).items() if k != "column.withheld"})
    (folder / TABLE).write_bytes(table)
    for name, data in ((groups_file(0), old), (TABLE, table)):
        head["files"][name] = {"xxh3": xxhash.xxh3_64_hexdigest(data), "size": len(data)}
    (folder / HEAD).write_text(json.dumps(head | {"format": 1, "schema": 5}))


def test_a_dump_of_before_is_still_read_and_has_no_log_probs(run, tmp_path, world):
    folder = tmp_path / "u2"
    shutil.copytree(run[0].run_dir / "dumps" / "u2", folder)
    as_written_before(folder)
    dump = read(folder)
    assert dump.logp is None
    assert same([asdict(g) for g in dump.ranks[0]], [asdict(g) for g in groups_of(dump.info, 2)])
    native = rescore(policy_of(dump, dump.policy, world), dump, world)
    assert np.array_equal(native.drift, run[1][2].table["drift"], equal_nan=True)


def test_the_content_of_a_dump_is_read_without_torch(run):
    folder = run[0].run_dir / "dumps" / "u2"
    code = (
        f"import sys; from asyncrl.learner.dump import content; c = content({str(folder)!r}); "
        "sys.exit('torch' in sys.modules or len(c.head.names) != 20 or len(c.logp) != 20)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert content(folder).columns["reward"].tolist() == read(folder).table["reward"].tolist()


def cut_off(info, update, full_routes=True):
    """Groups in which every second response was cut off by the length limit, with parts of its reward."""
    return [
        replace(
            g, trajectories=tuple(
                replace(t, finish_reason="length" if i % 2 else "stop", parts={"format": float(i)})
                for i, t in enumerate(g.trajectories)
            ),
        )
        for g in groups_of(info, update, full_routes)
    ]  # fmt: skip


def test_an_update_that_masked_cut_off_responses_is_made_again_from_its_dump(model_dir, world, tmp_path):
    config = settings(tmp_path / "run", model_dir, algorithm={"truncated": "mask"})
    outcomes, _ = train(config, world, 3, make=cut_off)
    dump = read(config.run_dir / "dumps" / "u2")
    assert [t.parts for t in dump.ranks[0][0].trajectories] == [{"format": float(i)} for i in range(4)]
    rows = rows_of_rank(dump, 0)
    assert [bool(r.loss_mask.any()) for r in rows] == [True, False] * 10
    policy = policy_of(dump, dump.policy, world)
    updater = Updater(policy, config.learner, config.algorithm, world)
    again = run_update(policy, updater, rows, 2, dump.head.carry, None, dump.config, dump.info, world)
    assert same(dict(sorted(again.table.columns.items())), dict(sorted(dump.table.columns.items())))
    assert again.step.loss == outcomes[2].step.loss != 0.0
    assert again.step.grad_norm == outcomes[2].step.grad_norm
    native = rescore(policy_of(dump, dump.policy, world), dump, world)
    assert np.array_equal(native.drift, dump.table["drift"], equal_nan=True)


def test_the_policy_is_that_before_the_update(run, model_dir):
    config, _, _ = run
    folders = [model_dir, config.run_dir / "dumps" / "u0" / "policy", config.run_dir / "dumps" / "u2" / "policy"]
    from safetensors.torch import load_file

    start, first, third = (load_file(f"{f}/model.safetensors") for f in folders)
    assert weights_of(folders[2]).keys() == weights_of(model_dir).keys()
    assert all(torch.equal(start[n], first[n]) for n in start)
    assert not any(torch.equal(start[n], third[n]) for n in start)


def test_drift_and_routes_come_out_again(run, world):
    config, outcomes, _ = run
    dump = read(config.run_dir / "dumps" / "u2")
    native = rescore(policy_of(dump, dump.policy, world), dump, world)
    assert np.array_equal(native.drift, outcomes[2].table["drift"], equal_nan=True)
    assert np.array_equal(native.layers[:, 1], outcomes[2].table["layer_1"], equal_nan=True)
    assert np.array_equal(native.ratio, outcomes[2].table["abs_log_ratio"])
    tokens = outcomes[2].table["tokens"].astype(int)
    assert [len(r) for r in native.routes] == [len(r) for r in rollout_routes(dump)] == tokens.tolist()
    assert (native.counts.sum(axis=2) == tokens[:, None] * 2).all()
    counted = np.bincount(native.routes[3][:, 1].ravel(), minlength=8)
    assert np.array_equal(counted, native.counts[3, 1])


def test_two_ranks_write_one_dump(model_dir, world, tmp_path):
    run_dir = tmp_path / "run"
    ended = run_ranks("tests/learner/dump_worker.py", 2, tmp_path, free_port(), run_dir, model_dir)
    assert ended.codes == [0, 0], ended.said[-4000:]
    assert list(named(run_dir)) == [0, 2]
    dump = read(run_dir / "dumps" / "u2")
    groups = groups_of(dump.info, 2)
    for rank in (0, 1):
        assert same([asdict(g) for g in dump.ranks[rank]], [asdict(g) for g in groups[rank::2]])
    ids = [t.trajectory_id for rank in dump.ranks for g in rank for t in g.trajectories]
    assert dump.table.ids == ids and len(ids) == 20
    assert dump.keep.shape == (20,) and 0 < dump.keep.sum() < 20
    native = rescore(policy_of(dump, dump.policy, world), dump, world)
    assert np.array_equal(native.drift, dump.table["drift"], equal_nan=True)


def test_the_old_log_probs_of_a_take_of_several_updates_are_kept(model_dir, world, tmp_path):
    config = settings(tmp_path / "run", model_dir)
    outcomes, _ = train(config, world, 1, taken=1)
    dump = read(config.run_dir / "dumps" / "u0")
    assert dump.old_logp is not None and dump.old_logp.keys() == set(dump.table.ids)
    policy = policy_of(dump, dump.policy, world)
    updater = Updater(policy, config.learner, config.algorithm, world)
    old = TakeState({k: torch.from_numpy(v) for k, v in dump.old_logp.items()})
    again = run_update(policy, updater, rows_of_rank(dump, 0), 0, 0.0, old, config, dump.info, world)
    assert again.step.loss == outcomes[0].step.loss


def test_without_the_setting_nothing_is_written(model_dir, world, tmp_path):
    config = settings(tmp_path / "run", model_dir, logging={"dump_every": 0})
    _, scalars = train(config, world, 1)
    assert scalars == [{}]
    assert not (config.run_dir / "dumps").exists()


def test_a_run_that_begins_anew_sets_the_dumps_of_before_aside(model_dir, world, tmp_path):
    config = settings(tmp_path / "run", model_dir, logging={"dump_policy": False})
    for _ in range(3):
        train(config, world, 1)
    train(config, world, 3, first=2, epoch=1)
    assert list(named(config.run_dir)) == [0, 2]
    assert sorted(f.name for f in config.run_dir.glob("dumps*")) == ["dumps", "dumps-1", "dumps-2"]


def test_the_policy_may_be_left_out(model_dir, world, tmp_path):
    config = settings(tmp_path / "run", model_dir, logging={"dump_policy": False})
    train(config, world, 1)
    folder = config.run_dir / "dumps" / "u0"
    assert read(folder).policy is None
    assert sorted(f.name for f in folder.iterdir()) == [HEAD, groups_file(0), logp_file(0), TABLE]


def test_a_dump_that_cannot_be_written_costs_nothing_but_a_line(model_dir, world, tmp_path, caplog):
    config = settings(tmp_path / "run", model_dir)
    config.run_dir.mkdir()
    (config.run_dir / "dumps").write_text("in the way")
    outcomes, scalars = train(config, world, 1)
    assert outcomes[0].step.outcome == "stepped"
    assert (scalars[0]["run/dump_failures"], scalars[0]["run/dump_bytes"]) == (1, 0)
    assert "u0 was not written" in caplog.text


def test_a_policy_that_is_not_finite_costs_its_dump_only(model_dir, world, tmp_path, caplog):
    from asyncrl.learner.dumping import Dumps
    from asyncrl.learner.shard import build_policy

    config = settings(tmp_path / "run", model_dir)
    policy = build_policy(config.model, config.learner, False, world)
    with torch.no_grad():
        policy.model.lm_head.weight.to_local()[3, 3] = torch.inf
    dumps = Dumps(config.run_dir, world, describe(model_dir), True)
    dumps.begin(policy, 0, 0, 0.0, config)
    dumps.finish([], 0, None, None)
    assert dumps.scalars()["run/dump_failures"] == 1
    assert "lm_head.weight is not finite" in caplog.text
    assert list((config.run_dir / "dumps").iterdir()) == []


@pytest.mark.parametrize("name", [HEAD, TABLE, groups_file(0), logp_file(0)])
@pytest.mark.parametrize("fault", ["flipped", "gone", "short"])
def test_a_damaged_dump_is_refused_with_its_file_and_the_remedy(name, fault, run, tmp_path):
    folder = tmp_path / "u2"
    shutil.copytree(run[0].run_dir / "dumps" / "u2", folder)
    file = folder / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x80
    {"flipped": lambda: file.write_bytes(data), "gone": file.unlink, "short": lambda: file.write_bytes(data[:-9])}[
        fault
    ]()
    remedy = "is no dump; give a folder" if (name, fault) == (HEAD, "gone") else "use another dump, or copy the folder"
    with pytest.raises(ConfigError, match=remedy) as refused:
        read(folder)
    assert str(file) in str(refused.value)


def test_a_dump_of_another_asyncrl_is_refused_by_its_numbers(run, tmp_path):
    folder = tmp_path / "u2"
    shutil.copytree(run[0].run_dir / "dumps" / "u2", folder)
    head = json.loads((folder / HEAD).read_text())
    (folder / HEAD).write_text(json.dumps(head | {"schema": 1}))
    with pytest.raises(ConfigError, match=r"wire schema 1, this asyncrl reads .*; read it with the asyncrl that wrote"):
        read(folder)
    (folder / HEAD).write_text(json.dumps(head | {"config": head["config"] | {"colour": "red"}}))
    with pytest.raises(ConfigError, match=r"dump.json has settings that this asyncrl does not know.*colour"):
        read(folder)


def test_groups_that_are_not_those_of_the_table_are_refused(run, world):
    dump = read(run[0].run_dir / "dumps" / "u2")
    other = replace(dump, ranks=[dump.ranks[0][::-1]])
    with pytest.raises(ConfigError, match="its groups are not those of its table"):
        rescore(policy_of(dump, dump.policy, world), other, world)
