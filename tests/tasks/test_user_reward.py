"""task.reward: functions of users in real workers, what they may return, and what is said of those that cannot run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import TaskError
from asyncrl.tasks.pool import Request, RewardPool, Score
from asyncrl.tasks.user_reward import UserReward, check

HERE = "tests.tasks.user_rewards"


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(90.0):
            return await work

    return asyncio.run(bounded())


def ask(name: str, texts: list[str], timeout_s: float = 60.0, **fields: str) -> tuple[list[Score], RewardPool]:
    with RewardPool(1, timeout_s, reward=f"{HERE}:{name}") as pool:
        requests = [Request("user", text, fields.get("answer", "2"), **_rest(fields)) for text in texts]
        return run(pool.score_many(requests)), pool


def _rest(fields: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in fields.items() if k != "answer"}


@pytest.mark.parametrize(
    ("name", "rewards"),
    [
        ("plain", [2.5, -3.0]),  # any finite number
        ("numpy_number", [0.5, 0.5]),
        ("numpy_truth", [1.0, 0.0]),
        ("anything", [1.0, 1.0]),
        ("slowly", [4.0, 1.0]),
        ("judge", [0.0, 1.0]),  # an object that can be called
    ],
)
def test_a_reward_per_response(name: str, rewards: list[float]) -> None:
    scores, _ = ask(name, ["good", "2"])
    assert [s.reward for s in scores] == rewards


def test_it_reads_what_it_declares_and_names_parts_and_may_print() -> None:
    fields = {"extra": '{"level": [1, 2]}', "data_source": "mine", "prompt": "1+1="}
    (right, wrong), pool = ask("everything", ["2", "x"], **fields)
    assert right == Score(1.0, parts={"length": 1.0, "style.ok": 1.0}, extracted="2")
    assert (wrong.reward, wrong.extracted) == (0.0, "X")
    assert pool.counters["scored"] == 2


def test_a_reward_per_group_is_one_call() -> None:
    with RewardPool(2, 60.0, reward=f"{HERE}:together") as pool:
        scores = run(pool.score_many([Request("user", text, "2") for text in ("a", "abcd", "ab")]))
        # Other verifiers are scored one by one, in the same pool.
        assert run(pool.score("chain_sum", "#2", "2")) == 1.0
    assert [s.reward for s in scores] == [0.25, 1.0, 0.5]
    assert [s.parts["rank"] for s in scores] == [0.0, 1.0, 2.0]
    assert len({s.parts["pid"] for s in scores}) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nan", "user_rewards:bad returned nan; return a number or a dict"),
        ("nan part", "bad returned part style inf"),
        ("no reward", "bad returned a dict without 'reward': it has ['style']"),
        ("text", "bad returned str '1.0'"),
        ("nothing", "bad returned NoneType 'None'"),
        ("text reward", "bad returned reward str '1.0'"),
        ("odd name", "bad returned a part named 'a/b'"),
        ("long name", "use up to 64 letters"),
        ("many parts", "bad returned 25 parts; at most 24 are kept"),
        ("extracted", "extracted=int '7'"),
        ("raise", "KeyError: 'the judge is ill'"),
    ],
)
def test_a_bad_result_is_an_error_of_that_response(text: str, reason: str) -> None:
    (bad, again), pool = ask("bad", [text, text])
    assert bad.reward is None and bad.error.startswith("error: ") and reason in bad.error
    assert again == bad and pool.counters["errors"] == 2 and pool.counters["restarts"] == 0


@pytest.mark.parametrize(
    ("texts", "rewards", "reason"),
    [
        (["short", "x", "y"], [None] * 3, "group returned 1 rewards for 3 responses"),
        (["seven", "x", "y"], [None] * 3, "group returned float '7.0' for 3 responses; return a list"),
        (["raise", "x", "y"], [None] * 3, "KeyError: 'the judge is ill'"),
        (["one bad", "x", "y"], [1.0, None, 0.0], "group returned for response 1 nan"),
    ],
)
def test_a_bad_result_for_a_group(texts: list[str], rewards: list[float | None], reason: str) -> None:
    scores, pool = ask("group", texts)
    assert [s.reward for s in scores] == rewards
    assert all(reason in s.error for s in scores if s.reward is None)
    assert pool.counters["errors"] == rewards.count(None)


@pytest.mark.parametrize(("name", "lost"), [("bad", 1), ("group", 2)])
def test_a_reward_that_hangs_has_a_deadline_for_each_call(name: str, lost: int) -> None:
    with RewardPool(1, 1.0, reward=f"{HERE}:{name}") as pool:
        scores = run(pool.score_many([Request("user", text, "") for text in ("hang", "nan")]))
        assert [s.timed_out for s in scores] == [i < lost for i in range(2)]
        assert pool.counters["timeouts"] == lost and pool.counters["restarts"] == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no.such.module:score", "importing 'no.such.module' failed with ModuleNotFoundError"),
        (f"{HERE}:missing", r"user_rewards.py\) has no function 'missing'"),
        (f"{HERE}:constant", "has an int, which cannot be called, as 'constant'"),
        (f"{HERE}:both", "it takes both text and texts"),
        (f"{HERE}:neither", "it takes neither text nor texts"),
        (f"{HERE}:unknown", "nothing is given for its parameter 'gold'; declare text"),
        (f"{HERE}:by_position", "nothing is given for its parameter 'text'"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused(name: str, reason: str) -> None:
    with pytest.raises(TaskError, match=f"(?s)task.reward={name}: .*{reason}"):
        UserReward(name)
    with RewardPool(1, 60.0, reward=name) as pool, pytest.raises(TaskError, match=f"did not start .*{reason}"):
        run(pool.score_many([Request("user", "x", "")]))


def write(folder: Path, name: str, body: str) -> str:
    (folder / f"{name}.py").write_text(body)
    return f"{name}:score"


def test_the_check_before_a_run_imports_nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where a run is started
    good = write(tmp_path, "reward_here", "def score(text, answer):\n    return text == answer\n")
    check(good, 2**30)
    for name, body, reason in (
        ("reward_hangs", "import time\ntime.sleep(3600)\n", "took more than 1 s"),
        ("reward_exits", "import sys\nsys.exit(0)\n", "SystemExit"),
        ("reward_dies", "import os\nos.abort()\n", r"died \(exit status -6\)"),
        ("reward_hoards", "x = bytearray(2**31)\n", "MemoryError"),
        ("reward_broken", "def score(text:\n", "SyntaxError"),
    ):
        timeout_s = 1.0 if "hangs" in name else 60.0
        with pytest.raises(TaskError, match=f"(?s)task.reward={name}:score.*{reason}"):
            check(write(tmp_path, name, body), 2**30, timeout_s)
    assert not {"reward_here", "reward_hangs"} & set(__import__("sys").modules)
    with RewardPool(1, 60.0, reward=good) as pool:
        assert run(pool.score_many([Request("user", "7", "7")])) == [Score(1.0)]
    assert os.getcwd() == str(tmp_path)


def test_a_worker_without_a_reward_says_so() -> None:
    with RewardPool(1, 60.0) as pool:
        (outcome,) = run(pool.score_many([Request("user", "7", "7")]))
    assert outcome.error == "error: TaskError: the worker was started without a task.reward"
