"""The environments of examples/, through the real pool."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrl.config import load_config
from asyncrl.tasks.environments import Step
from asyncrl.tasks.environments.pool import EnvironmentPool
from tests.system.conftest import ROOT


def steps(name: str, prompt: str, answer: str, *texts: str) -> list[Step]:
    async def run() -> list[Step]:
        with EnvironmentPool(name, 1, 60.0, 2**32) as pool:
            episode = pool.episode(prompt, answer)
            return [await episode.step(text) for text in texts]

    return asyncio.run(run())


def configured(name: str) -> Any:
    """The environment that the config of this name trains with."""
    config = load_config([ROOT / "configs/quickstart.yaml", ROOT / f"configs/examples/{name}.yaml"])
    assert config.task.environment is not None
    return config.task.environment


def test_the_calculator_answers_calls_and_pays_for_the_right_answer():
    name = configured("calculator")
    called, asked, wrong, right = steps(name, "#3-4+10=", "9", "", "20-3+1", "3+=", "+9#9")
    assert called == Step("=9", False, 0.0, {"calls": 1.0, "tool_errors": 0.0})
    assert asked.observation == "=18"
    assert wrong == Step("=", False, 0.0, {"calls": 1.0, "tool_errors": 1.0})
    assert right == Step(None, True, 1.0, {"calls": 0.0, "tool_errors": 0.0})
    (guess,) = steps(name, "#3-4+10=", "9", "#09")
    assert guess.done and guess.reward == 0.0


@pytest.mark.parametrize(
    ("first", "second", "reward", "parts"),
    [
        ("+4=5+9=14#14", None, 1.0, {"first": 1.0, "corrected": 0.0}),
        ("#1", "14#14", 0.5, {"first": 0.0, "corrected": 1.0}),
        ("14", "13#13", 0.0, {"first": 0.0, "corrected": 0.0}),
    ],
)
def test_self_correction_gives_a_hint_once(first, second, reward, parts):
    texts = [first] if second is None else [first, second]
    found = steps(configured("self_correction"), "1+4+9=", "14", *texts)
    assert [s.observation for s in found] == ["=5+9=", None][-len(found) :]
    assert found[-1] == Step(None, True, reward, parts)
