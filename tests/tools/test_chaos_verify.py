"""The proof of tools/chaos.py must fail where something is wrong: each test breaks one thing in a sound run."""

from pathlib import Path

import pytest
from chaos_lib.evidence import Evidence, Settings
from chaos_lib.verify import NEVER, table, verify

SETTINGS = Settings(updates=3, groups_per_update=2, max_lag=2, train_size=3, capacity_bytes=1000, stale="mask")
ORDER = ["0/a", "0/b", "0/c", "1/a", "1/b", "1/c"]


def event(t, kind, link="g0", client=1, replay=1, **values):
    return {"t": t, "link": link, "client": client, "replay": replay, "kind": kind, **values}


def lease(t, *ids, **where):
    return event(t, "leases", given=[[i, 1] for i in ids], **where)


def group(t, group_id, versions, **where):
    return event(t, "group", id=group_id, generator=where.get("link", "g0"), attempt=1, versions=versions, **where)


def admit(t, *ids, **where):
    return event(t, "ack", admitted=list(ids), resolved=[], **where)


def commit(t, update, *ids):
    return event(t, "commit", link="learner", update=update, outcome="trained", ids=list(ids), take=update - 1)


def publish(t, epoch, update, batches):
    return event(t, "published", link="learner", version=[epoch, update], batches=batches)


def line(update, group_id, epoch=0, generator="g0"):
    return {"update": update, "epoch": epoch, "group_id": group_id, "generator_id": generator, "outcome": "trained",
            "batch": update}  # fmt: skip


def status(**changes):
    base = {"t": 99.0, "incarnation": 1, "fds": 20, "bytes": 0, "peak_bytes": 800, "dropped": [], "counters": {}}
    return base | changes


@pytest.fixture
def run():
    """Two data epochs of three prompts in three updates, of which one fault disturbed nothing."""
    tap = [publish(0.0, 0, 0, 0)]
    for update in range(3):
        ids, t = ORDER[2 * update : 2 * update + 2], 10.0 * update
        tap += [lease(t + 1, *ids), event(t + 1, "held", version=[0, update])]
        tap += [group(t + 3, i, [(0, update)]) for i in ids]
        tap += [admit(t + 4, *ids), commit(t + 9, update + 1, *ids), publish(t + 9.5, 0, update + 1, update + 1)]
    exits = [
        {"t": 40.0, "event": "exit", "role": r, "incarnation": 1, "status": 0, "cause": ""} for r in ("g0", "learner")
    ]
    fault = {"t": 5.0, "event": "fault", "kind": "latency", "name": "g1", "target": "generator", "seconds": 1.0}
    return Evidence(
        SETTINGS,
        tap,
        [fault, *exits],
        [status()],
        [{"update": u, "policy/reward": 0.5, "staleness/lag_max": 1.0} for u in range(3)],
        [line(i // 2, g) for i, g in enumerate(ORDER)],
        {"processes": [], "ports": [], "shared_memory": [], "own_descriptors": 0},
        {"replay": "INFO all is well\n"},
    )


def broken(run):
    """The claims that do not hold."""
    return [entry.claim for entry in verify(run) if not entry.ok]


def test_a_sound_run_is_proved(run):
    assert broken(run) == [], table(verify(run))


def test_a_group_that_is_trained_twice(run):
    run.journal.append(line(2, "0/a"))
    assert "trained twice on the surviving timeline" in broken(run)


def test_an_acknowledged_group_whose_prompt_is_given_out_again_for_no_reason(run):
    run.tap.insert(-3, lease(6.0, "0/a"))
    assert broken(run) == ["acknowledged groups lost"]


@pytest.mark.parametrize(
    ("exits", "lost"),
    [
        ([("replay", 1)], True),
        ([("g0", 1)], True),
        ([("replay", 1), ("g0", 1)], False),
        ([("replay", 2), ("g0", 1)], True),
    ],
)
def test_only_the_end_of_both_keepers_excuses_a_loss(run, exits, lost):
    run.faults += [
        {"t": 5.0, "event": "exit", "role": r, "incarnation": n, "status": -9, "cause": "killed:0"} for r, n in exits
    ]
    run.tap.insert(-3, lease(7.0, "0/a", link="g1", replay=2))
    assert ("acknowledged groups lost" in broken(run)) is lost


@pytest.mark.parametrize(
    ("kind", "name", "lost"),
    [("kill", "replay", True), ("reset", "g0", True), ("stop", "g0", False), ("partition_up", "g0", False)],
)
def test_a_killed_replay_excuses_a_loss_only_when_the_generator_was_out_of_reach(run, kind, name, lost):
    run.faults.append(
        {"t": 5.0, "event": "exit", "role": "replay", "incarnation": 1, "status": -9, "cause": "killed:1"}
    )
    fault = {"kind": kind, "name": name, "target": name, "incarnation": 1, "seconds": 1.0}
    run.faults.append({"t": 5.0, "event": "fault", **fault})
    run.tap.insert(-3, lease(7.0, "0/a", link="g1", replay=2))
    assert ("acknowledged groups lost" in broken(run)) is lost


def test_a_hold_takes_the_acknowledgement_back(run):
    run.tap.insert(5, event(5.0, "hold", ids=["0/a"]))
    run.tap.insert(-3, lease(8.0, "0/a", link="g1"))
    assert broken(run) == ["acknowledged groups lost"]
    run.faults.append({"t": 6.0, "event": "exit", "role": "g0", "incarnation": 1, "status": -9, "cause": "killed:0"})
    assert broken(run) == []


def test_an_acknowledged_group_that_nobody_heard_of_again(run):
    run.journal = [entry for entry in run.journal if entry["group_id"] != "0/b"]
    found = broken(run)
    assert "prompts open at the end" in found
    assert any(claim.startswith("updates without their whole batch") for claim in found)


def test_an_evicted_group_needs_its_counter_and_its_age(run):
    run.tap.insert(-3, lease(25.0, "0/a"))
    assert "acknowledged groups lost" in broken(run)
    run.status = [status(counters={"overtaken": 1})]
    assert "acknowledged groups lost" not in broken(run)


def lost(run):
    (found,) = [entry for entry in verify(run) if entry.claim == "acknowledged groups lost"]
    return found.value, found.detail


def test_an_eviction_excuses_no_loss_beside_it(run):
    """0/a is young enough when its prompt is given out again, 0/b is too old by then."""
    run.tap += [lease(25.0, "0/a"), lease(31.0, "0/b")]
    run.status = [status(counters={"stale": 1})]
    assert lost(run) == (1, "0/a")
    run.status = [status(counters={"lost_version": 2})]
    assert lost(run)[0] == 2
    run.status = [status(counters={"stale": 1, "overtaken": 1})]
    assert lost(run)[0] == 0


def test_an_eviction_excuses_only_what_was_here_when_it_was_counted(run):
    """0/b was acknowledged at 4 and its prompt given out again at 31."""
    run.tap.append(lease(31.0, "0/b"))
    for when, found in ((2.0, 1), (20.0, 0), (40.0, 1)):
        counted = status(t=when + 0.5, counters={"stale": 1})
        run.status = [status(t=when), counted, status(counters={"stale": 1})]
        assert lost(run)[0] == found, when


def test_a_commit_of_a_group_whose_result_nobody_saw(run):
    run.tap = [e for e in run.tap if e.get("id") != "1/c"]
    assert broken(run) == ["groups committed of which no result was seen"]


def test_every_counter_that_must_stay_at_0_exists():
    listed = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    assert [name for name in NEVER if f"`{name}`" not in listed] == []


def rolled_back(run):
    """The learner began again from update 1: update 1 is undone, and made again with the same groups."""
    later = [line(u, g, epoch=1) for u, g in ((1, "0/c"), (1, "1/a"), (2, "1/b"), (2, "1/c"))]
    run.journal = [*run.journal[:4], {"rolled_back_to": 1, "epoch": 1, "update": 1, "source": ""}, *later]
    run.tap = [e for e in run.tap if e["t"] < 20] + [
        publish(21.0, 1, 1, 1), lease(22.0, "0/c", "1/a", "1/b", "1/c"),
        *[group(23.0, i, [(1, 1)]) for i in ("0/c", "1/a", "1/b", "1/c")], admit(24.0, "0/c", "1/a", "1/b", "1/c"),
        commit(25.0, 2, "0/c", "1/a"), commit(26.0, 3, "1/b", "1/c"), publish(27.0, 1, 3, 3),
    ]  # fmt: skip
    # what ran ahead: published by the process that was killed
    run.tap.insert(0, publish(0.0, 0, 0, 0))
    run.status = [status(counters={"rolled_back": 2})]


def test_what_a_rollback_undid_is_trained_again(run):
    rolled_back(run)
    assert broken(run) == [], table(verify(run))


def test_a_rollback_excuses_nothing_before_it(run):
    rolled_back(run)
    run.tap.insert(-10, lease(16.0, "0/c"))
    assert lost(run) == (1, "0/c")


def test_a_rollback_is_still_there_for_the_lease_that_it_caused(run):
    """0/c was lost with both its keepers first, made again by others, and undone then."""
    rolled_back(run)
    run.faults += [
        {"t": 15.0, "event": "exit", "role": r, "incarnation": 1, "status": -9, "cause": "killed:0"}
        for r in ("replay", "g0")
    ]
    where = {"link": "g1", "replay": 2}
    run.tap[-10:-10] = [lease(16.5, "0/c", **where), group(17.0, "0/c", [(0, 1)], **where), admit(17.5, "0/c", **where)]
    assert lost(run) == (0, "given out again: both_ended 1, rolled_back 2")


def test_an_undone_group_that_counts_as_trained(run):
    rolled_back(run)
    run.status = [status(counters={"rolled_back": 1})]
    assert broken(run) == ["rolled back: lines undone = counted by replay"]
    run.journal[4]["rolled_back_to"] = 2
    assert "lines on which asyncrl's own surviving timeline differs" in broken(run)


def test_a_token_of_a_lost_version(run):
    rolled_back(run)
    for e in run.tap:
        if e["kind"] == "group" and e["id"] == "1/c" and e["t"] == 23.0:
            e["versions"] = [(0, 2)]
    assert "groups trained without a token young enough, or of lost versions" in broken(run)


def test_a_broken_lag_by_the_learners_figure_and_by_the_frames(run):
    run.metrics[1]["staleness/lag_max"] = 3.0
    assert broken(run) == ["largest lag of a trained token"]
    run.metrics[1]["staleness/lag_max"] = 2.0
    run.settings = SETTINGS._replace(max_lag=1)
    run.metrics[1]["staleness/lag_max"] = 1.0
    for e in run.tap:
        e["versions"] = [(0, 0)] if e.get("id") == "1/c" else e.get("versions")
    assert broken(run) == ["groups trained without a token young enough, or of lost versions"]


def test_versions_that_fall(run):
    run.tap.append(publish(40.0, 0, 1, 1))  # told again: it is known
    assert broken(run) == []
    run.tap += [publish(41.0, 0, 5, 5), publish(42.0, 0, 4, 4), event(43.0, "held", version=[0, 0])]
    assert broken(run) == ["publications that did not rise", "generators whose version fell"]


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        ({"peak_bytes": 1001}, "payload peak, bytes"),
        ({"dropped": [["0/a", "max_attempts"]]}, "trained and also reported dropped"),
        ({"counters": {"unknown_group": 1, "duplicate": 7}}, "messages that replay refused"),
    ],
)
def test_a_status_that_contradicts(run, change, claim):
    run.status.append(status(**change))
    assert broken(run) == [claim]


def test_a_prompt_that_is_reported_dropped_counts(run):
    run.journal = [entry for entry in run.journal if entry["group_id"] != "1/a"]
    run.status = [status(dropped=[["1/a", "max_attempts"]], counters={"lost_payload": 1})]
    assert broken(run) == []


def test_a_prompt_that_is_skipped(run):
    """0/c is never given out although epoch 1 is."""
    for e in run.tap:
        e["given"] = [g for g in e.get("given", []) if g[0] != "0/c"]
        e["ids"] = [i for i in e.get("ids", []) if i != "0/c"]
    run.tap = [e for e in run.tap if e.get("id") != "0/c"]
    run.journal = [entry for entry in run.journal if entry["group_id"] != "0/c"]
    assert "data epochs passed that lack some of 3 prompts" in broken(run)


def test_updates_that_are_missing_repeated_or_undone(run):
    whole = list(run.metrics)
    run.metrics.pop(1)
    assert broken(run) == ["updates that count in metrics.jsonl, in order"]
    # A second run epoch makes update 1 again: what was recorded from there on counts no more.
    run.metrics = [*whole, *[dict(r, **{"run/epoch": 1.0}) for r in whole[1:]]]
    assert broken(run) == []
    run.metrics = [*whole[:2], whole[1], whole[2]]
    assert broken(run) == ["asyncrl's own timeline of metrics.jsonl = this one"]


def test_a_process_that_outlives_its_killed_role(run):
    run.faults.append({"t": 6.0, "event": "left", "role": "g0", "commands": ["worker"]})
    assert broken(run) == ["roles started again beside what their last process left"]


@pytest.mark.parametrize(
    ("key", "claim"),
    [
        ("processes", "processes left"),
        ("ports", "ports left open"),
        ("shared_memory", "folders left in shared memory"),
    ],
)
def test_what_is_left_behind(run, key, claim):
    run.facts[key] = ["something"]
    assert broken(run) == [claim]


def test_descriptors_that_grow(run):
    run.status = [status(fds=20 + 3 * n) for n in range(12)]
    run.facts["own_descriptors"] = 1
    assert broken(run) == ["descriptors left in this process", "processes of replay whose descriptors grow"]


def test_a_role_that_ends_by_itself(run):
    run.faults.append({"t": 6.0, "event": "exit", "role": "g0", "incarnation": 1, "status": 1, "cause": ""})
    run.logs["g0"] = "Traceback (most recent call last)\n  File x\nValueError: no\n"
    assert broken(run) == ["roles that ended with an error that was not our doing", "tracebacks and errors in the logs"]


def test_no_progress_after_the_last_fault(run):
    run.faults.insert(
        0, {"t": 90.0, "event": "fault", "kind": "reset", "name": "g0", "target": "generator", "seconds": 0}
    )
    assert broken(run) == ["batches committed after the last fault"]
