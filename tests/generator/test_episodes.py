"""Episodes of several turns: what was sampled and what was observed stay aligned, and every way out is clean."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from asyncrl import wire
from asyncrl.engines.gate import Gate
from asyncrl.errors import EngineError, RouteError, TrajectoryError, WireError
from asyncrl.generator import episodes as episodes_module
from asyncrl.generator.collect import to_trajectory
from asyncrl.generator.episodes import Episodes
from asyncrl.generator.rollout import Rollout, rollouts
from asyncrl.generator.turns import Played, check_turn, merge
from asyncrl.learner.batch import collate, rows_of
from asyncrl.replay.digest import digest
from asyncrl.tasks.environments.observations import Observations
from asyncrl.tasks.environments.pool import EnvironmentPool
from asyncrl.tasks.text import Decoder
from asyncrl.types import Completion, Group, ModelInfo, Prompt, SamplingParams, Segment, Version
from tests.generator.tracer_engine import INFO, STOP, TracerEngine, logprobs_at, routes_at
from tests.tasks.conftest import SYMBOLS, write_tokenizer

SCRIPTED = "tests.generator.scripted_environment:Scripted"
SAMPLING = SamplingParams(1.0, 64, (STOP,))
PROMPT = np.array([5, 12, 6, 14], np.int32)  # 3+4=
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def char_dir(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), SYMBOLS)


def prompt_of(observations: list[str | None], **extra: Any) -> Prompt:
    text = json.dumps({"observations": observations, **extra})
    return Prompt("p", PROMPT, "3+4=", "7", "chain_sum", "chain_sum", text)


def with_episodes(char_dir: Any, job: Any, max_turns: int = 8, timeout_s: float = LIMIT_S, info: Any = INFO) -> Any:
    """Run job(episodes) with a real pool of one worker."""

    async def run() -> Any:
        with EnvironmentPool(SCRIPTED, 1, timeout_s, 2**32) as pool:
            made = Episodes(pool, Observations(char_dir, False), Decoder(char_dir), info, max_turns)
            async with asyncio.timeout(100):
                return await job(made)

    return asyncio.run(run())


def play(
    char_dir: Any, engine: Any, prompt: Prompt, sampling: Any = SAMPLING, n: int = 1, **rest: Any
) -> list[Rollout]:
    async def job(made: Episodes) -> list[Rollout]:
        return await rollouts(engine, prompt, n, sampling, LIMIT_S, made)

    return with_episodes(char_dir, job, **rest)


def trajectory(rollout: Rollout, name: str = "g#1.0", reward: float = 0.0) -> Any:
    return to_trajectory(rollout.completion, name, len(PROMPT), reward, INFO, True, (STOP,))


def observed(engine: TracerEngine) -> list[tuple[int, int]]:
    """Absolute [start, end) of the observations of the first conversation, by the prompts that the engine was given."""
    turns = next(iter(engine.turns.values()))
    before = [(len(ids), length) for (ids, _), length in zip(turns, engine.lengths, strict=False)]
    return [(p + t, q) for (p, t), (q, _) in pairwise(before)]


@pytest.mark.parametrize("seed", range(6))
def test_four_turns_of_random_lengths_keep_ids_log_probs_and_routes_at_their_places(char_dir, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, 4).tolist()
    said = ["".join(rng.choice(list("0123456789+-"), rng.integers(1, 6))) for _ in range(3)]
    engine = TracerEngine(lengths, [[0], [0, 1], [1], [1, 3]])
    (rollout,) = play(char_dir, engine, prompt_of([*said, None]))
    done, p = rollout.completion, len(PROMPT)
    turns = next(iter(engine.turns.values()))
    assert [turn.rows for _, turn in turns] == [
        0,
        *(len(ids) + n - 1 for (ids, _), n in zip(turns[:3], lengths, strict=False)),
    ]
    # Every prompt is all that came before it.
    whole = np.concatenate([PROMPT, done.token_ids])
    assert all((whole[: len(ids)] == ids).all() for ids, _ in turns)
    total = len(whole)
    assert total == p + sum(lengths) + sum(map(len, said))
    sampled = np.ones(total, bool)
    sampled[:p] = False
    for start, end in observed(engine):
        sampled[start:end] = False
    assert done.sampled.tolist() == sampled[p:].tolist()
    places = np.arange(p, total)
    np.testing.assert_array_equal(done.logprobs, np.where(sampled[p:], logprobs_at(places), np.nan))
    np.testing.assert_array_equal(done.routes, routes_at(np.arange(total - 1)))
    assert [SYMBOLS[i] for i in whole[slice(*observed(engine)[0])]] == list(said[0])
    assert done.finish_reason == "stop" and done.token_ids[-1] == STOP
    # The counts of drift are of the sampled tokens, each at the row that predicts it.
    t = trajectory(rollout)
    want = np.zeros((INFO.num_experts,), int)
    for place in places[sampled[p:]]:
        want[routes_at(np.array([place - 1])).ravel()] += 1
    np.testing.assert_array_equal(t.route_counts.sum(axis=(0, 1)), want)
    assert t.loss_mask.tolist() == sampled[p:].tolist()
    assert rollout.score.reward == 1 + 2 + 3 + 4
    assert rollout.score.parts["turns"] == 4 and rollout.score.parts["steps"] == 4
    assert engine.forgotten == list(engine.turns)


def test_segments_cover_the_response_and_observations_belong_to_the_turn_that_read_them(char_dir):
    engine = TracerEngine([3, 4, 2], [[0], [0, 2], [2]])
    (rollout,) = play(char_dir, engine, prompt_of(["12", "3", None]))
    # 3 sampled, 2 observed, 2 sampled | 2 sampled, 1 observed, 2 sampled
    assert rollout.completion.segments == (Segment(Version(0, 0), 0, 7), Segment(Version(0, 2), 7, 12))
    older = TracerEngine([3, 4], [[1], [0]])
    with pytest.raises(TrajectoryError, match=r"version 0\.0 comes after 0\.1"):
        play(char_dir, older, prompt_of(["12", None]))


def test_the_whole_way_to_the_learner(char_dir):
    """Encode, queue, decode, collate: what trains is what was sampled, with counts per version."""
    engine = TracerEngine([3, 2, 4], [[2], [2], [5]])
    first, second = play(char_dir, engine, prompt_of(["12", "+", None]), n=2)
    made = tuple(trajectory(r, f"g#1.{i}", float(i)) for i, r in enumerate((first, second)))
    group = Group("g", prompt_of([]), "g0", 1, 1.0, made, 1.0)
    frames = wire.encode_group(group)
    told = digest(wire.read_group(frames))
    assert [r.length for r in told.responses] == [12, 12] and [r.updates for r in told.responses] == [(2, 5)] * 2
    rows = rows_of([wire.decode_group(frames)], 6, 0, INFO)
    batch = collate(rows, [0, 1], INFO, True, True)
    mask = batch.predict_mask[0].numpy()
    # Response tokens 0-2, 5-6 and 8-11 were sampled; row P - 1 + j predicts token j.
    assert np.flatnonzero(mask).tolist() == [3, 4, 5, 8, 9, 11, 12, 13, 14]
    np.testing.assert_array_equal(batch.rollout_logp[0].numpy()[mask], logprobs_at(np.flatnonzero(mask) + 1))
    np.testing.assert_array_equal(batch.routes[:, 0, :15].permute(1, 0, 2).numpy(), routes_at(np.arange(15)))
    counts = rows[0].counts
    assert counts.sum() == 9 * len(INFO.layers) * INFO.top_k
    assert counts[0, routes_at(np.array([8]))[0, 0]].tolist() == [1, 1]
    assert counts[0, routes_at(np.array([6]))[0, 0]].tolist() == [0, 0]  # predicts an observed token
    # The stop token in the middle of an episode trains, too.
    assert batch.targets[0][mask].tolist().count(STOP) == 3
    # A stale first version takes its tokens and its counts away, and no others.
    stale = rows_of([wire.decode_group(frames)], 6, 3, INFO)[0]
    assert stale.loss_mask.sum() == 4 and stale.counts.sum() == 4 * len(INFO.layers) * INFO.top_k


def test_the_last_turn_allowed_leaves_no_observation_behind(char_dir):
    engine = TracerEngine([3, 3, 3])
    (rollout,) = play(char_dir, engine, prompt_of(["12", "34", "56"]), max_turns=2)
    done = rollout.completion
    assert len(done.token_ids) == 3 + 2 + 3 and done.finish_reason == "stop" and done.token_ids[-1] == STOP
    assert rollout.score.reward == 3 and rollout.score.parts["turns"] == 2
    trajectory(rollout)


def test_done_ends_the_episode_and_its_observation_is_not_used(char_dir):
    (rollout,) = play(char_dir, TracerEngine([3, 3, 3]), prompt_of(["12", "34"], end=2))
    assert len(rollout.completion.token_ids) == 8 and rollout.score.reward == 3


@pytest.mark.parametrize(("budget", "tokens", "turns"), [(7, 3, 1), (8, 8, 2), (10, 10, 2), (11, 11, 2), (12, 11, 2)])
def test_an_episode_without_room_ends_with_length(char_dir, budget, tokens, turns):
    # 3 sampled, 4 observed, 4 sampled (11 so far), 4 observed, ...
    engine = TracerEngine([3, 4, 4])
    (rollout,) = play(char_dir, engine, prompt_of(["1234", "1234", None]), replace(SAMPLING, max_new_tokens=budget))
    done = rollout.completion
    assert len(done.token_ids) == tokens and done.finish_reason == "length"
    assert rollout.score.parts["turns"] == turns == rollout.score.parts["steps"]
    assert done.sampled[-1] and len(done.routes) == len(PROMPT) + tokens - 1
    trajectory(rollout)


def test_empty_responses_end_an_episode_without_an_observation_that_nobody_answered(char_dir):
    (rollout,) = play(char_dir, TracerEngine([3, 0, 3]), prompt_of(["12", "34", "5"]))
    assert len(rollout.completion.token_ids) == 3 and rollout.completion.finish_reason == "stop"
    assert len(trajectory(rollout).token_ids) == 3 and rollout.score.parts["turns"] == 1
    (rollout,) = play(char_dir, TracerEngine([0, 3]), prompt_of(["12", "34"]))
    assert len(rollout.completion.token_ids) == 0 and rollout.score.reward == 1
    assert trajectory(rollout).loss_mask.shape == (0,)


def test_a_turn_that_another_reason_ended_is_the_last(char_dir):
    engine = TracerEngine([3, 3])
    engine.finish = "abort"
    (rollout,) = play(char_dir, engine, prompt_of(["12", "34"]))
    assert len(rollout.completion.token_ids) == 3 and rollout.completion.finish_reason == "abort"


@pytest.mark.parametrize(("unknown", "want"), [({1: 8}, 0), ({1: 9}, 9), ({0: 2, 1: 8}, 2), ({0: 2, 1: 10}, 10)])
def test_rows_that_an_engine_does_not_know_stay_unknown_unless_an_earlier_turn_knew_them(char_dir, unknown, want):
    # Rows 0-5 came with turn 1 (4 + 3 - 1), the prompt of turn 2 has 9 tokens.
    engine = TracerEngine([3, 4])
    engine.routes_from = {k: v - 2 if k else v for k, v in unknown.items()}
    (rollout,) = play(char_dir, engine, prompt_of(["12", None]))
    assert rollout.completion.routes_from == (want - 2 if want > 2 else want)


def test_an_environment_that_fails_has_no_reward_and_says_why(char_dir):
    (rollout,) = play(char_dir, TracerEngine([3, 3]), prompt_of(["1", "2"], **{"raise": 2}))
    assert rollout.score.reward is None and "RuntimeError: told to" in rollout.score.error
    assert not rollout.score.timed_out and len(rollout.completion.token_ids) == 7
    (rollout,) = play(char_dir, TracerEngine([3, 3]), prompt_of(["no such character", "2"]))
    assert rollout.score.reward is None and "cannot write the observation" in rollout.score.error
    (rollout,) = play(char_dir, TracerEngine([3, 3]), prompt_of(["1", "2"], hang=1), timeout_s=3)
    assert rollout.score.reward is None and rollout.score.timed_out


def test_what_is_unfinished_at_the_limit_is_left_out_and_forgotten(char_dir):
    async def by_engine(made: Episodes) -> None:
        engine = TracerEngine([3, 3])
        engine.hangs_at = 1
        assert await made.play(engine, prompt_of(["1", "2"]), 3, SAMPLING, 0.3) == []
        assert sorted(engine.forgotten) == sorted(engine.turns) and len(engine.turns) == 3

    with_episodes(char_dir, by_engine)

    async def by_environment(made: Episodes) -> None:
        engine = TracerEngine([3, 3])
        assert await made.play(engine, prompt_of(["1", "2"], hang=1), 1, SAMPLING, 0.5) == []
        assert engine.forgotten == list(engine.turns)

    with_episodes(char_dir, by_environment)


def test_cancelling_ends_all_episodes_and_forgets_them(char_dir):
    async def job(made: Episodes) -> None:
        engine = TracerEngine([3, 3])
        engine.hangs_at = 1
        task = asyncio.create_task(made.play(engine, prompt_of(["1", "2"]), 4, SAMPLING, LIMIT_S))
        while sum(map(len, engine.turns.values())) < 8:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sorted(engine.forgotten) == sorted(engine.turns) and len(engine.turns) == 4
        while any(worker.episodes for worker in made.pool._workers):
            await asyncio.sleep(0.01)

    with_episodes(char_dir, job)


def test_an_error_of_the_engine_ends_the_episodes_of_the_group(char_dir):
    class Failing(TracerEngine):
        async def generate(self, *args: Any, **rest: Any) -> list[Completion]:
            if len(self.turns) == 2:
                raise EngineError("out of memory")
            return await super().generate(*args, **rest)

    async def job(made: Episodes) -> None:
        engine = Failing([3, 3])
        engine.hangs_at = 1
        with pytest.raises(EngineError, match="out of memory"):
            await made.play(engine, prompt_of(["1", "2"]), 3, SAMPLING, LIMIT_S)
        assert len(engine.forgotten) == 3

    with_episodes(char_dir, job)


def test_a_turn_behind_the_gate_of_new_weights_carries_its_own_version(char_dir):
    class Stats(TracerEngine):
        def stats(self) -> dict[str, float]:
            return {}

    engine = Stats([3, 3], [[0], [4]])
    (rollout,) = play(char_dir, Gate(engine, "abort"), prompt_of(["12", None]))
    assert rollout.completion.segments == (Segment(Version(0, 0), 0, 3), Segment(Version(0, 4), 3, 8))
    assert engine.forgotten == list(engine.turns)


# --- B20 ------------------------------------------------------------------------------------------


def ambiguous(folder: Any) -> Any:
    """Ids 3 and 4 decode to the text that encodes to 7."""
    vocab = {"x": 0, "<eos>": 1, "z": 2, "a": 3, "b": 4, "c": 5, "d": 6, "ab": 7}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert tokenizer.encode(Decoder(folder).decode([3, 4])).ids == [7]
    return folder


class SaysAb(TracerEngine):
    """Samples 3, 4 and stops."""

    async def generate(self, *args: Any, **rest: Any) -> list[Completion]:
        (done,) = await super().generate(*args, **rest)
        done.token_ids[:2] = (3, 4)
        return [done]


def test_b20_sampled_ids_survive_into_the_next_prompt_the_trajectory_and_the_learner(tmp_path):
    engine = SaysAb([3, 3])
    prompt = replace(prompt_of(["ab", None]), token_ids=np.array([5, 6], np.int32))
    (rollout,) = play(ambiguous(tmp_path), engine, prompt)
    (_, (second, _)) = next(iter(engine.turns.values()))
    assert second.tolist() == [5, 6, 3, 4, 1, 7]
    t = to_trajectory(rollout.completion, "g#1.0", 2, 1.0, INFO, True, (1,))
    assert t.token_ids.tolist() == [3, 4, 1, 7, 3, 4, 1]
    group = wire.decode_group(wire.encode_group(Group("g", prompt, "g0", 1, 1.0, (t,), 1.0)))
    batch = collate(rows_of([group], 0, 0, INFO), [0], INFO, True, True)
    assert batch.input_ids[0].tolist() == [5, 6, 3, 4, 1, 7, 3, 4, 1]
    assert batch.targets[0][batch.predict_mask[0]].tolist() == [3, 4, 1, 3, 4, 1]


def test_b20_a_turn_that_begins_with_other_ids_is_refused(tmp_path, monkeypatch):
    """An episode that writes its text and encodes it again: [3, 4] becomes [7]."""
    folder = ambiguous(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    sound = episodes_module._Conversation._observe

    async def encodes_again(self: Any, ids: Any, done: Any) -> Any:
        following = await sound(self, ids, done)
        if following is None:
            return None
        text = tokenizer.decode(following.tolist(), skip_special_tokens=False)
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    monkeypatch.setattr(episodes_module._Conversation, "_observe", encodes_again)
    prompt = replace(prompt_of(["c", None]), token_ids=np.array([5, 6], np.int32))
    with pytest.raises(TrajectoryError, match="turn 1 is not what the turns after it began with"):
        play(folder, SaysAb([3, 3]), prompt)


def test_b20_a_turn_without_ids_is_refused(char_dir):
    class TextOnly(TracerEngine):
        async def generate(self, *args: Any, **rest: Any) -> list[Completion]:
            (done,) = await super().generate(*args, **rest)
            done.token_ids = None  # type: ignore[assignment]
            return [done]

    with pytest.raises(TrajectoryError, match="no token ids; the engine must return the ids that it sampled"):
        play(char_dir, TextOnly([3, 3]), prompt_of(["1", None]))
    (rollout,) = play(char_dir, TracerEngine([3, 3]), prompt_of(["1", None]))
    frames = wire.encode_group(Group("g", prompt_of([]), "g0", 1, 1.0, (trajectory(rollout),), 1.0))
    with pytest.raises(WireError, match="buffers are missing"):
        wire.decode_group([*frames[:2], *frames[3:]])


# --- pure parts -----------------------------------------------------------------------------------


def played(prompt: list[int], ids: list[int], rows: int = 0, **changes: Any) -> Played:
    n = len(ids)
    routes = routes_at(np.arange(rows, len(prompt) + n - 1))
    done = Completion(np.array(ids, np.int32), -np.ones(n, np.float32), (Segment(Version(0, 0), 0, n),), "stop", routes)
    for name, value in changes.items():
        setattr(done, name, value)
    return Played(np.array(prompt, np.int32), rows, done)


def test_a_prefix_that_differs_in_one_token_is_refused():
    first = played([5, 6], [3, 1])
    assert merge([first, played([5, 6, 3, 1, 9], [1], 3)], "stop", "e").token_ids.tolist() == [3, 1, 9, 1]
    for prompt in ([5, 7, 3, 1, 9], [5, 6, 4, 1, 9], [5, 6, 3]):
        with pytest.raises(TrajectoryError, match="e: turn 1 is not what the turns after it began with"):
            merge([first, played(prompt, [1], 3)], "stop", "e")


def test_a_turn_with_other_rows_than_it_should_have_is_refused():
    check_turn(played([5, 6], [3, 1]), INFO, (1,), "e")
    with pytest.raises(RouteError, match="expected 3 route rows from row 0 on, received 2"):
        check_turn(played([5, 6], [3, 1], routes=routes_at(np.arange(2))), INFO, (1,), "e")
    with pytest.raises(RouteError, match="received None"):
        check_turn(played([5, 6], [3, 1], routes=None), INFO, (1,), "e")
    with pytest.raises(TrajectoryError, match="do not cover its 2 tokens"):
        check_turn(played([5, 6], [3, 1], segments=(Segment(Version(0, 0), 0, 1),)), INFO, (1,), "e")
    with pytest.raises(TrajectoryError, match="no stop token"):
        check_turn(played([5, 6], [3, 4]), INFO, (1,), "e")
    dense = ModelInfo((), 0, 0, 64)
    check_turn(played([5, 6], [3, 1], routes=None), dense, (1,), "e")
    assert merge([played([5, 6], [3, 1], routes=None)], "stop", "e").routes is None
