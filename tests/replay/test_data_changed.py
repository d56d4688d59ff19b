"""Replay of a task of files: what it logs, and that it goes on with the same data only."""

from __future__ import annotations

import logging
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl import wire
from asyncrl.config import Config, validate
from asyncrl.errors import ConfigError, TaskError
from asyncrl.models.describe import describe
from asyncrl.replay.evals import Evaluations
from asyncrl.replay.limits import group_bytes, largest_group_bytes, largest_message, longest_of, texts_of
from asyncrl.replay.server import run
from asyncrl.replay.snapshot import FILE, SnapshotFile, data_fingerprint, fingerprint
from asyncrl.tasks import build
from asyncrl.transport.rendezvous import wait_for_address
from asyncrl.transport.sockets import Client
from asyncrl.types import Group
from tests.replay.support import make_prompts, make_queue, response
from tests.replay.test_process import model_folder
from tests.tasks.data_files import jsonl


def make(tmp_path: Path) -> Config:
    if not (tmp_path / "model").exists():
        model_folder(tmp_path / "model")
    jsonl(tmp_path / "train.jsonl", [{"problem": f"{i}+1=", "answer": str(i + 1)} for i in range(20)])
    jsonl(tmp_path / "test.jsonl", [{"problem": f"{i}-1=", "answer": str(i - 1)} for i in range(4)])
    task = {
        "name": "sources",
        "train": [{"path": str(tmp_path / "train.jsonl")}],
        "eval": [{"path": str(tmp_path / "test.jsonl")}],
    }
    return validate(
        {
            "run": {"dir": str(tmp_path / "runs"), "name": "r"},
            "model": {"path": str(tmp_path / "model")},
            "task": task,
            "algorithm": {"groups_per_update": 4, "group_size": 2},
        }
    )


def write_snapshot(config: Config) -> None:
    task, queue = build(config.task, config.model.path), make_queue()
    config.run_dir.mkdir(parents=True, exist_ok=True)
    mark = fingerprint(config, describe(config.model.path))
    SnapshotFile(config.run_dir, mark, data_fingerprint(task.train, task.eval)).write(
        queue=queue.save(), evaluations=Evaluations([], queue.tally, every=0).save(), restarts=0, source="",
        generators=[], done=False, journal_bytes=0,
    )  # fmt: skip


def test_another_file_under_the_same_name_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make(tmp_path)
    write_snapshot(config)
    rows = [{"problem": f"{i}+2=", "answer": str(i + 2)} for i in range(20)]
    jsonl(tmp_path / "train.jsonl", [*rows, rows[0]])
    caplog.set_level(logging.INFO)
    with pytest.raises(ConfigError, match=r"other prompts: what a file of task\.train.*put the file back as it was"):
        run(config, config.run_dir)
    assert any(m.startswith("task.train[0] train: 20 prompts of up to ") for m in caplog.messages)
    assert any("from 21 rows of" in m and "left out: duplicate 1; scored by integer" in m for m in caplog.messages)


def test_the_same_data_goes_on(tmp_path: Path) -> None:
    config = make(tmp_path)
    write_snapshot(config)
    task = build(make(tmp_path).task, config.model.path)
    mark, data = fingerprint(config, describe(config.model.path)), data_fingerprint(task.train, task.eval)
    assert SnapshotFile(config.run_dir, mark, data).read() is not None
    # `asyncrl run --resume` reads it before any prompt is built
    assert SnapshotFile(config.run_dir, mark).read() is not None


def test_what_replay_itself_wrote_is_of_its_data(tmp_path: Path) -> None:
    config = make(tmp_path)
    process = multiprocessing.get_context("spawn").Process(target=run, args=(config, config.run_dir), daemon=True)
    process.start()
    try:
        client = Client(wait_for_address(config.run_dir / "replay.address", 90.0), b"g0")
        info = describe(config.model.path)
        client.send(
            wire.encode(
                wire.Hello(
                    wire.SCHEMA, "generator", "g0", "b", list(info.layers), info.num_experts, info.top_k,
                    info.vocab_size, info.fingerprint,
                )
            )
        )  # fmt: skip
        assert client.recv(60.0) is not None  # what it answers with is on disk
        client.close()
    finally:
        process.kill()
        process.join(10)
        process.close()
    assert (config.run_dir / FILE).exists()
    jsonl(tmp_path / "test.jsonl", [{"problem": "9-9=", "answer": "0"}])
    with pytest.raises(ConfigError, match="other prompts"):
        run(config, config.run_dir)


def test_a_file_that_is_gone_ends_replay_with_its_name(tmp_path: Path) -> None:
    config = make(tmp_path)
    (tmp_path / "test.jsonl").unlink()
    with pytest.raises(TaskError, match=r"task\.eval\[0\]\.path=.*test\.jsonl' does not exist"):
        run(config, config.run_dir)


def test_room_is_reserved_for_the_longest_prompt_of_all(tmp_path: Path) -> None:
    config = make(tmp_path)
    model = describe(config.model.path)
    prompts = [p.__class__(p.prompt_id, p.token_ids.repeat(9 if i == 999 else 1), "", "", "") for i, p in
               enumerate(make_prompts(1000))]  # fmt: skip
    assert longest_of(prompts) == 27
    assert group_bytes(config, model, prompts) == largest_group_bytes(config, model, 27)


def test_room_is_reserved_for_the_texts_that_travel_with_a_prompt(tmp_path: Path) -> None:
    config = make(tmp_path)
    model = describe(config.model.path)
    # What a file says beside prompt and answer: any size, and every group has it.
    prompts = [replace(p, text="ab", answer="\u00e9", extra="x" * 5_000_000 * (i == 1)) for i, p in
               enumerate(make_prompts(3))]  # fmt: skip
    assert texts_of(prompts) == 5_000_004
    one_group = group_bytes(config, model, prompts)
    assert one_group == largest_group_bytes(config, model, 3) + 5_000_004
    # A socket that let in less would never let this group in, and its generator would send it for ever.
    responses = tuple(response(name, [(0, 4)]) for name in "ab")
    frames = wire.encode_group(Group("0/p1", prompts[1], "g0", 1, 1.0, responses))
    assert sum(map(len, frames)) < one_group < largest_message(one_group, config.algorithm.group_size)[0]


def test_what_a_reward_reads_of_a_row_belongs_to_the_data() -> None:
    prompts = make_prompts(2)
    other = [replace(prompts[0], extra='{"level": 2}'), prompts[1]]
    assert data_fingerprint(prompts) == data_fingerprint(make_prompts(2)) != data_fingerprint(other)
