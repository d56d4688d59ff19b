"""How the responses to one prompt come about: one request to the engine, or episodes with an environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from asyncrl.engines.base import Engine
from asyncrl.tasks.pool import Score
from asyncrl.types import Completion, Prompt, SamplingParams

if TYPE_CHECKING:
    from asyncrl.generator.episodes import Episodes


class Rollout(NamedTuple):
    """One response, with its score where the environment gave one; None leaves scoring to the rewards."""

    completion: Completion
    score: Score | None = None


async def rollouts(
    engine: Engine,
    prompt: Prompt,
    n: int,
    sampling: SamplingParams,
    limit_s: float,
    episodes: Episodes | None = None,
) -> list[Rollout]:
    """Up to n responses: those that were finished within limit_s. Raises EngineError as the engine does.

    episodes: what plays them with an environment, with the errors of Episodes.play; None for one request each.
    """
    if episodes is not None:
        return await episodes.play(engine, prompt, n, sampling, limit_s)
    return [Rollout(c) for c in await engine.generate(prompt.token_ids, n, sampling, limit_s)]
