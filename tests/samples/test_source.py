"""From dumps to the responses that are asked for: which, in what order, with what numbers."""

import gc
import json
import math
import shutil
import subprocess
import sys
import weakref

import numpy as np
import pytest

from asyncrl.errors import ConfigError
from asyncrl.learner.dump import content, read
from asyncrl.metrics.sink import to_line
from asyncrl.samples import source
from asyncrl.samples.source import NoSample, Wanted, find
from asyncrl.samples.words import facts, largest, level
from tests.samples.conftest import TEXTS


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def texts(found):
    return ["".join(p.text for p in s.parts) for s in found.samples]


def test_the_newest_dump_is_shown_with_the_text_that_was_sampled(run):
    found = find(Wanted(run))
    assert (found.updates, found.seen, found.total, found.notes) == ([2], 8, 8, [])
    assert [s.update for s in found.samples] == [2] * 8
    assert texts(found) == [f"{text}<|end|>" for g in TEXTS for text in TEXTS[g]]
    assert found.samples[0].prompt == "What is 0 + 1?\n" and found.samples[4].prompt == "What is 1 + 1?\n"
    assert {s.gold for s in found.samples} == {"gold 0", "gold 1"}
    assert [(s.data_source, s.verifier, s.generator) for s in found.samples[::4]] == [
        ("sums", "test", "g0"), ("other", "test", "g1"),
    ]  # fmt: skip


def test_the_numbers_are_those_of_the_update(run):
    dump = read(run / "dumps" / "u2")
    for i, s in enumerate(find(Wanted(run)).samples):
        assert s.name == dump.table.ids[i]
        assert (s.reward, s.length, s.trained) == tuple(dump.table[n][i] for n in ("reward", "length", "tokens"))
        assert (s.lag, s.bucket, s.advantage) == (dump.table["lag"][i], dump.bucket[i], dump.advantages[i])
        assert s.drift == dump.table["drift"][i] or math.isnan(s.drift)
        assert s.mean_ratio == pytest.approx(dump.table["abs_log_ratio"][i], rel=1e-5)
        assert (s.took == "dropped by the filter") == (not dump.keep[i])
        response = [t for g in dump.ranks[0] for t in g.trajectories][i]
        wanted = dump.logp[s.name].astype(np.float64) - response.logprobs
        assert np.array_equal(s.ratio[response.loss_mask], wanted[response.loss_mask])
        assert np.isnan(s.ratio[~response.loss_mask]).all()
    first, last = find(Wanted(run)).samples[0], find(Wanted(run)).samples[-1]
    assert dict(first.rewards) == {"format": 0.5, "turns": 2.0}
    assert [(p.version, p.start, p.end, p.lag) for p in last.spans] == [("0.1", 0, 4, 1), ("0.2", 4, 151, 0)]
    assert last.finish == "length" and last.lag == 1


def test_what_the_policy_did_not_sample_is_marked_and_has_no_ratio(run):
    parts = find(Wanted(run)).samples[0].parts
    assert [p.start for p in parts if not p.sampled] == [4, 5, 6, 7]
    assert all((p.ratio is None) == (not p.sampled) for p in parts)


def test_a_piece_of_several_tokens_shows_the_ratio_that_is_furthest_from_0(run):
    s = find(Wanted(run)).samples[1]
    emoji = next(p for p in s.parts if p.text == "\N{GRINNING FACE}")
    values = s.ratio[emoji.start : emoji.end]
    assert len(values) == 4 and emoji.ratio == values[np.abs(values).argmax()]
    assert [p.ratio for p in largest(s, 2)] == sorted((p.ratio for p in s.parts), key=lambda r: -abs(r))[:2]


def test_orders_take_all_dumps_and_the_highest_first(run):
    for order, column in (("drift", "drift"), ("lag", "lag"), ("length", "length")):
        found = find(Wanted(run, order=order, limit=16))
        values = [getattr(s, column) for s in found.samples]
        known = [v for v in values if not math.isnan(v)]
        assert sorted(found.updates) == [0, 2] and len(values) == 16
        assert known == sorted(known, reverse=True) and values[: len(known)] == known
    assert [s.name for s in find(Wanted(run, order="length", limit=1)).samples] == ["0/p1#0.3"]
    assert find(Wanted(run, order="newest", limit=9)).updates == [2, 0]
    assert find(Wanted(run, updates=(0,))).updates == [0]


def test_filters_choose_by_reward_filter_and_source(run):
    dump = read(run / "dumps" / "u2")
    assert [s.reward for s in find(Wanted(run, (2,), reward=0.25)).samples] == [0.25, 0.25]
    dropped = find(Wanted(run, (2,), dropped=True))
    assert dropped.total == dump.would_drop.sum() > 0
    assert all(s.took == "dropped by the filter" for s in dropped.samples)
    found = find(Wanted(run, (2,), reward=1.0, source="other"))
    assert [(s.data_source, s.reward) for s in found.samples] == [("other", 1.0)] * 2
    with pytest.raises(NoSample, match=r"none of the 8 responses in the dumps of update 2 is reward 7$"):
        find(Wanted(run, (2,), reward=7.0))
    with pytest.raises(NoSample, match=r"is of data source 'x'; data sources: other, sums"):
        find(Wanted(run, (2,), source="x"))


def test_a_damaged_dump_is_left_out_with_its_sentence_and_the_others_are_shown(copy):
    (copy / "dumps" / "u2" / "rank0.groups").write_bytes(b"x")
    found = find(Wanted(copy))
    assert found.updates == [0] and len(found.samples) == 8
    (note,) = found.notes
    assert "left out" in note and "u2/rank0.groups is damaged" in note and "use another dump" in note
    (copy / "dumps" / "u0" / "dump.json").unlink()
    with pytest.raises(ConfigError, match=r"u2/rank0.groups is damaged"):
        find(Wanted(copy))


def test_without_dumps_the_remedy_is_said(copy):
    shutil.rmtree(copy / "dumps")
    with pytest.raises(ConfigError, match=r"has no dump: run with logging.dump_every=10"):
        find(Wanted(copy))
    with pytest.raises(ConfigError, match=r"is no run folder"):
        find(Wanted(copy / "nothing"))


def test_a_dump_that_a_later_learner_undid_is_left_out_unless_it_is_named(copy):
    line = to_line(2, 0.0, {"policy/reward": 0.0, "run/epoch": 1.0})
    with (copy / "metrics.jsonl").open("a") as out:
        out.write(line + "\n")
    found = find(Wanted(copy))
    assert found.updates == [0] and "which a later learner undid; it is left out" in found.notes[0]
    assert find(Wanted(copy, (2,))).updates == [2]


def test_a_tokenizer_that_is_gone_costs_the_text_only(copy, start, monkeypatch, tmp_path):
    for update in (0, 2):
        shutil.rmtree(copy / "dumps" / f"u{update}" / "policy")
        head = copy / "dumps" / f"u{update}" / "dump.json"
        tree = json.loads(head.read_text())
        tree["config"]["model"]["path"] = str(tmp_path / "moved")
        head.write_text(json.dumps(tree))
    found = find(Wanted(copy, limit=1))
    assert texts(found)[0].startswith("<") and "give the folder with the tokenizer as --model" in found.notes[0]
    assert texts(find(Wanted(copy, limit=1, model=start))) == [f"{TEXTS[0][0]}<|end|>"]


def test_a_dump_of_before_says_that_it_has_no_log_probs(copy):
    from tests.learner.test_dump import as_written_before

    as_written_before(copy / "dumps" / "u2")
    found = find(Wanted(copy))
    assert "the dump of update 2 has no learner log-probs" in found.notes[0]
    assert all(s.ratio is None and {level(p.ratio) for p in s.parts} == {0} for s in found.samples)
    assert dict(facts(found.samples[0]))["log pi/mu"] == "no learner log-probs"


def test_it_is_read_without_torch(run):
    code = (
        "import sys; from pathlib import Path; from asyncrl.samples.source import Wanted, find; "
        "import asyncrl.samples.page, asyncrl.samples.terminal; "
        f"found = find(Wanted(Path({str(run)!r}))); sys.exit('torch' in sys.modules or len(found.samples) != 8)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_log_probs_of_what_is_not_shown_do_not_stay_in_memory(run, monkeypatch):
    read_so_far, alive, show = [], [], source._shown

    def reading(folder):
        dump = content(folder)
        read_so_far.extend(weakref.ref(values) for values in dump.logp.values())
        return dump

    def showing(rows, wanted, notes):
        gc.collect()
        alive.append(sum(ref() is not None for ref in read_so_far))
        assert len({row.dump.update for row in rows}) == 2
        return show(rows, wanted, notes)

    monkeypatch.setattr(source, "content", reading)
    monkeypatch.setattr(source, "_shown", showing)
    assert len(find(Wanted(run, order="drift", limit=10)).samples) == 10
    # What is shown, and the dump that was read last.
    assert len(read_so_far) == 16 and alive[0] < 16


def test_a_model_folder_that_is_not_there_is_refused(run, tmp_path):
    with pytest.raises(ConfigError, match=r"--model '.*nope' is no folder"):
        find(Wanted(run, model=tmp_path / "nope"))


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({}, "sums, verifier test"),
        ({"environment": "games.chess:Env"}, "sums, environment games.chess:Env"),
        ({"reward": "mine:judge"}, "sums, reward mine:judge"),
    ],
)
def test_who_gave_the_reward_is_named(copy, task, said):
    head = copy / "dumps" / "u2" / "dump.json"
    tree = json.loads(head.read_text())
    tree["config"]["task"] |= task
    head.write_text(json.dumps(tree))
    assert dict(facts(find(Wanted(copy)).samples[0]))["source"] == said
