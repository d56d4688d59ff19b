"""The console's line on the first failure: from a real replay, once, readable, and never a hindrance."""

import time

import pytest

from asyncrl import wire
from asyncrl.config import save_config, validate
from asyncrl.resume import own
from asyncrl.watch import first_failure as module
from asyncrl.watch.first_failure import FirstFailure
from asyncrl.watch.folder import look, words
from tests.watch.test_show import ask, make_replay  # noqa: F401  (fixture)

pytestmark = pytest.mark.timeout(300)


def test_the_first_failure_is_said_once(make_replay, monkeypatch):  # noqa: F811
    monkeypatch.setattr(module, "EACH_S", 0.2)
    replay = make_replay()
    generator, folder = replay.join("generator", "g0"), replay.config.run_dir
    with FirstFailure(folder) as failure:
        ask(generator, wire.Status(), wire.StatusReply)
        assert failure.news() == ""
        for reason in ("TaskError: 8 of 8 not scored: \x1b[2J", "TaskError: another"):
            generator.send(wire.encode(wire.Failed("", "", reason)))
        deadline, said = time.monotonic() + 100, ""
        while not (said := failure.news()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert said == f"first failure: generator g0: TaskError: 8 of 8 not scored: \\x1b[2J (asyncrl status {folder})"
        assert failure.news() == ""


def test_without_a_replay_nothing_is_said_and_the_end_comes_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "EACH_S", 0.05)
    with FirstFailure(tmp_path / "none") as failure:
        failure._thread.join(100)  # no config: it gives up
        assert not failure._thread.is_alive() and failure.news() == ""
    folder = tmp_path / "run"
    folder.mkdir()
    save_config(validate({"model": {"path": "m"}}), folder / "config.yaml")
    with FirstFailure(folder) as failure:
        time.sleep(0.2)
        assert failure._thread.is_alive() and failure.news() == ""
    assert not failure._thread.is_alive()


def test_a_run_whose_replay_does_not_answer_yet_says_where_to_look(tmp_path):
    save_config(validate({"model": {"path": "m"}}), tmp_path / "config.yaml")
    with own(tmp_path):
        said = words(tmp_path, look(tmp_path))
    assert "is being started, or started again" in said[0]
    assert said[1] == f"what it does: {tmp_path / 'logs' / 'replay.log'}"
