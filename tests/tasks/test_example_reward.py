"""The example of a user's reward, through the real pool."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrl.tasks.pool import Request, RewardPool
from asyncrl.tasks.user_reward import check

NAME = "examples.rewards.short_and_clear:score"


def test_the_example_scores_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    check(NAME, 2**30)
    texts = ["3+4=7#7", "3+4=8#8", "7", "7#x", "=" * 140 + "#7", "=" * 10_000 + "#7"]

    async def ask(pool: RewardPool) -> list[tuple[float | None, str]]:
        scores = await pool.score_many([Request("user", text, "7") for text in texts])
        for score in scores:
            assert score.reward == pytest.approx(sum(score.parts.values())), score.error
            assert sorted(score.parts) == ["form", "length", "right"]
        return [(score.reward, score.extracted) for score in scores]

    with RewardPool(2, 60.0, reward=NAME) as pool:
        found = asyncio.run(ask(pool))
    assert [reward for reward, _ in found] == pytest.approx([1.1, 0.1, 0.0, 0.0, 1.0, 0.9])
    assert [extracted for _, extracted in found] == ["7", "8", "7", "x", "7", "7"]
