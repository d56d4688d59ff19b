"""Turns that go on from what the engine kept, against fresh requests with the same tokens."""

from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.engines.base import Turn
from asyncrl.engines.flat import FlatDecoder
from asyncrl.engines.module_decoder import CachedDecoder, RecomputeDecoder, cached_or_recompute
from asyncrl.models.names import stream
from asyncrl.models.routes import RouteHook
from asyncrl.types import Segment, Version
from tests.engines.support import LOUD, Stepper, check, plain_forward
from tests.engines.talk import DECODERS, Talk, assert_same, model_of, sampling
from tests.helpers import tiny_models


@pytest.mark.parametrize("dense", [False, True], ids=["moe", "dense"])
@pytest.mark.parametrize("make", DECODERS)
@pytest.mark.parametrize("seeds", [(None,) * 4, (5, 6, 7, 8)], ids=["greedy", "seeded"])
def test_four_turns_equal_fresh_requests_with_the_same_tokens(make, dense, seeds):
    kept, fresh = (Stepper(model_of(dense), make=make, dense=dense) for _ in range(2))
    talk, expected_reuse, expected_run = Talk(kept, seed=3), 0, 0
    before = 0
    for seed in seeds:
        params = sampling(int(talk.rng.integers(1, 20)), seed)
        prompt, rows = list(talk.ids), sum(len(part) for part in talk.rows)
        expected_reuse, expected_run = expected_reuse + before, expected_run + len(prompt) - before
        done = talk.turn(params)
        other = fresh.submit(prompt, 1, params)
        fresh.finish()
        assert_same(done, other.completions[0], rows)
        before = len(talk.ids) - 1
        if not dense:
            assert sum(len(part) for part in talk.rows) == before
        talk.observe()
    saves = make is not RecomputeDecoder
    assert kept.batch.conversations.reused_tokens == (expected_reuse if saves else 0)
    assert kept.batch.prompt_tokens == (expected_run if saves else fresh.batch.prompt_tokens)
    assert len(kept.batch.conversations) == saves
    # All rows together are those of the model itself, one for every input token.
    _, native = plain_forward(kept.model, kept.hook, np.array(talk.ids, np.int32))
    if not dense:
        np.testing.assert_array_equal(np.sort(np.concatenate(talk.rows), -1), np.sort(native[:before], -1))


@pytest.mark.parametrize("family", [*tiny_models.FAMILIES, "sliding mixtral", "yarn"])
def test_conversations_of_other_lengths_go_on_in_one_step_in_every_family(family):
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
    special = {
        "sliding mixtral": lambda: tiny_models.mixtral(**LOUD, sliding_window=6),
        "yarn": lambda: tiny_models.qwen3_moe(**LOUD, rope_parameters=rope),
    }
    stepper = Stepper(special[family]() if family in special else tiny_models.FAMILIES[family](**LOUD))
    talks = [Talk(stepper, f"c{i}", seed=i) for i in range(4)]
    for turn in range(3):
        for talk in talks:
            talk.ask(sampling(2 + 3 * turn, None if turn % 2 else turn + 1))
        prompts = [list(talk.ids) for talk in talks]
        steps = stepper.batch.steps
        stepper.finish()
        assert stepper.batch.steps - steps == 2 + 3 * turn, "all of them are admitted at once"
        for talk, prompt in zip(talks, prompts, strict=True):
            done = talk.hear()
            done.routes = np.concatenate(talk.rows)
            check(stepper.model, stepper.hook, np.array(prompt, np.int32), done, talk.request.sampling)
            talk.observe(20)
    assert stepper.batch.conversations.reused_tokens > 100


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_go_on_too(dtype):
    model = tiny_models.qwen3_moe(**LOUD, dtype=dtype)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")
    kept, fresh = Stepper(model), Stepper(model)
    talk = Talk(kept)
    talk.turn(sampling(9, 1))
    talk.observe()
    prompt = list(talk.ids)
    done = talk.turn(sampling(9, 2))
    logits, _ = plain_forward(model, kept.hook, np.array(talk.ids, np.int32))
    logp = torch.log_softmax(logits[len(prompt) - 1 : -1].double() / 0.8, -1)
    wanted = logp.gather(1, torch.tensor(done.token_ids).long()[:, None])[:, 0].numpy()
    # Of bfloat16 the plain module itself is off by 0.006 on average.
    assert np.abs(done.logprobs - wanted).mean() < (1e-6 if dtype == torch.float64 else 0.02)
    assert fresh.batch.conversations.reused_tokens == 0 < kept.batch.conversations.reused_tokens


def test_a_load_between_two_turns_drops_what_is_kept():
    stepper, other = Stepper(model_of(False)), tiny_models.qwen3_moe(**LOUD, seed=1)
    talk, stale = Talk(stepper), Stepper(model_of(False))
    twin = Talk(stale)
    for one in (talk, twin):
        one.turn(sampling(7))
        one.observe()
    rows = sum(len(part) for part in talk.rows)
    stepper.load(Version(0, 4), stream(other))
    assert len(stepper.batch.conversations) == 0
    prompt = list(talk.ids)
    done = talk.turn(sampling(9))
    fresh = Stepper(other)
    fresh.batch.set_version(Version(0, 4))
    expected = fresh.submit(prompt, 1, sampling(9))
    fresh.finish()
    assert_same(done, expected.completions[0], rows)
    assert done.segments == (Segment(Version(0, 4), 0, 9),)
    assert stepper.batch.conversations.reused_tokens == 0
    # Those numbers tell: with the old keys and values under the new weights they would be others.
    stale.load(Version(0, 4), stream(other))
    stale.batch.conversations._kept["c"] = twin_state(twin, rows)
    wrong = twin.turn(sampling(9))
    assert stale.batch.conversations.reused_tokens == rows
    assert not np.allclose(wrong.logprobs, done.logprobs, atol=1e-3)


def twin_state(talk: Talk, rows: int) -> Any:
    """What a twin that saw no load would have kept of a conversation."""
    stepper = Stepper(model_of(False))
    same = Talk(stepper)
    same.turn(sampling(7))
    state = stepper.batch.conversations._kept["c"]
    assert len(state.token_ids) == rows and state.token_ids.tolist() == talk.ids[:rows]
    return state


def test_the_same_version_loaded_again_drops_it_too():
    stepper = Stepper(model_of(False))
    Talk(stepper).turn(sampling(3))
    stepper.batch.set_version(stepper.batch.version)
    assert len(stepper.batch.conversations) == 0


@pytest.mark.parametrize("make", [FlatDecoder, CachedDecoder])
def test_a_turn_that_ran_through_a_load_goes_on_as_one_response_would(make):
    """Its keys and values are of both versions, and its segments say so."""
    one, two = (Stepper(model_of(False), make=make) for _ in range(2))
    other = tiny_models.qwen3_moe(**LOUD, seed=1)
    whole, talk = one.submit([5, 6, 7], 1, sampling(20)), Talk(two)
    talk.ids = [5, 6, 7]
    talk.ask(sampling(12))
    for stepper in (one, two):
        for _ in range(4):
            stepper.batch.step()
        stepper.load(Version(0, 8), stream(other))
        stepper.finish()
    first = talk.hear()
    assert first.segments == (Segment(Version(0, 0), 0, 4), Segment(Version(0, 8), 4, 12))
    second = talk.turn(sampling(8))
    assert second.segments == (Segment(Version(0, 8), 0, 8),)
    assert two.batch.conversations.reused_tokens == 14
    (expected,) = whole.completions
    np.testing.assert_array_equal(np.concatenate((first.token_ids, second.token_ids)), expected.token_ids)
    np.testing.assert_allclose(np.concatenate((first.logprobs, second.logprobs)), expected.logprobs, atol=1e-5)
    np.testing.assert_array_equal(np.sort(np.concatenate(talk.rows), -1), np.sort(expected.routes, -1))


def test_of_a_cut_turn_the_prompt_is_kept_unless_it_ran_through_a_load():
    stepper, fresh = Stepper(model_of(False)), Stepper(model_of(False))
    for loads in (False, True):
        talk = Talk(stepper, f"c{loads}", seed=4)
        talk.ask(sampling(30))
        for _ in range(3):
            stepper.batch.step()
        if loads:
            stepper.batch.set_version(stepper.batch.version)
        before = stepper.batch.conversations.reused_tokens
        stepper.batch.cut(talk.request)
        assert talk.request.error is None and talk.request.completions == [] and not stepper.batch.busy
        prompt = list(talk.ids)
        done = talk.turn(sampling(5))
        expected = fresh.submit(prompt, 1, sampling(5))
        fresh.finish()
        # The caller has no row yet, so all of them come: the kept ones, too.
        assert_same(done, expected.completions[0], 0)
        assert stepper.batch.conversations.reused_tokens - before == (0 if loads else len(prompt) - 1)


def test_a_cut_while_it_waits_leaves_the_turns_before():
    stepper = Stepper(model_of(False), rows=1)
    talk = Talk(stepper)
    talk.turn(sampling(4))
    talk.observe()
    other = stepper.submit([1], 1, sampling(6))
    stepper.batch.step()
    talk.ask(sampling(4))
    stepper.batch.cut(talk.request)
    assert len(stepper.batch.conversations) == 1 and not other.ended


def test_forgotten_and_cancelled_conversations_are_freed():
    stepper = Stepper(model_of(False))
    talks = [Talk(stepper, f"c{i}", seed=i) for i in range(4)]
    for talk in talks:
        talk.turn(sampling(4))
        talk.observe()
    assert len(stepper.batch.conversations) == 4
    stepper.batch.forget("c0")
    stepper.batch.forget("nobody")
    assert len(stepper.batch.conversations) == 3
    for talk in talks[1:3]:
        talk.ask(sampling(30))
    stepper.batch.cancel(talks[1].request)  # it waits
    assert len(stepper.batch.conversations) == 2
    stepper.batch.step()
    stepper.batch.cancel(talks[2].request)  # it runs
    assert len(stepper.batch.conversations) == 1
    # Forgotten while it runs: nothing is kept at its end.
    talks[3].turn(sampling(2))
    talks[3].ask(sampling(6))
    stepper.batch.step()
    stepper.batch.forget("c3")
    stepper.finish()
    assert talks[3].hear().finish_reason == "length"
    assert len(stepper.batch.conversations) == 0


def test_a_turn_with_numbers_that_are_not_finite_keeps_nothing():
    stepper = Stepper(model_of(False))
    talk = Talk(stepper)
    talk.turn(sampling(3))
    with torch.no_grad():
        stepper.model.model.norm.weight.mul_(float("nan"))
    stepper.decoder.refresh()
    talk.ask(sampling(3))
    stepper.finish()
    assert "not finite" in str(talk.request.error) and len(stepper.batch.conversations) == 0


def test_the_one_that_was_used_longest_ago_makes_room():
    stepper, fresh = Stepper(model_of(False), rows=3), Stepper(model_of(False))
    talks = [Talk(stepper, f"c{i}", seed=i) for i in range(4)]
    for number in (0, 1, 2, 0, 3):
        talks[number].turn(sampling(3))
        talks[number].observe()
    assert list(stepper.batch.conversations._kept) == ["c2", "c0", "c3"]
    before = stepper.batch.conversations.reused_tokens
    prompt, rows = list(talks[1].ids), len(talks[1].rows[0])
    done = talks[1].turn(sampling(6))
    expected = fresh.submit(prompt, 1, sampling(6))
    fresh.finish()
    assert_same(done, expected.completions[0], rows)
    assert stepper.batch.conversations.reused_tokens == before


def test_a_prompt_that_is_not_what_came_before_is_run_whole():
    stepper, fresh = Stepper(model_of(False)), Stepper(model_of(False))
    talk = Talk(stepper, seed=2)
    talk.turn(sampling(6))
    talk.ids[2] = (talk.ids[2] + 1) % 64
    talk.rows = []
    prompt = list(talk.ids)
    done = talk.turn(sampling(6))
    expected = fresh.submit(prompt, 1, sampling(6))
    fresh.finish()
    assert_same(done, expected.completions[0], 0)
    assert stepper.batch.conversations.reused_tokens == 0
    # What it then kept is of that prompt.
    talk.observe()
    talk.turn(sampling(2))
    assert stepper.batch.conversations.reused_tokens == len(prompt) + 6 - 1


def test_two_turns_of_one_name_at_once_are_both_answered():
    stepper, fresh = Stepper(model_of(False)), Stepper(model_of(False))
    talk = Talk(stepper)
    talk.turn(sampling(5))
    talk.observe()
    prompt, rows = list(talk.ids), len(talk.rows[0])
    requests = [stepper.submit(prompt, 1, sampling(4), Turn("c", rows)) for _ in range(3)]
    expected = fresh.submit(prompt, 1, sampling(4))
    for one in (stepper, fresh):
        one.finish()
    for request in requests:
        assert_same(request.completions[0], expected.completions[0], rows)
    assert len(stepper.batch.conversations) == 1


def test_long_observations_and_a_growing_cache():
    stepper = Stepper(tiny_models.qwen3_moe(**LOUD, max_position_embeddings=512), rows=4)
    talks = [Talk(stepper, f"c{i}", seed=i) for i in range(3)]
    for talk in talks:
        talk.turn(sampling(3))
    for talk, length in zip(talks, (1, 300, 40), strict=True):
        talk.ids += talk.rng.integers(0, 64, length).tolist()
        talk.ask(sampling(5, 9))
    prompts = [list(talk.ids) for talk in talks]
    stepper.finish()
    for talk, prompt in zip(talks, prompts, strict=True):
        done = talk.hear()
        done.routes = np.concatenate(talk.rows)
        check(stepper.model, stepper.hook, np.array(prompt, np.int32), done, talk.request.sampling)


def test_a_model_whose_saved_state_is_wrong_is_found_out(caplog, monkeypatch):
    model = tiny_models.FAMILIES["olmoe"](**LOUD)
    hook = RouteHook(model)
    restore = CachedDecoder.restore
    monkeypatch.setattr(CachedDecoder, "restore", lambda self, row, saved: restore(self, row, saved[::-1]))
    decoder = cached_or_recompute(model, hook, 2)
    assert isinstance(decoder, CachedDecoder) and not decoder.saves and decoder.save(0, 1) is None
    assert "every turn of a conversation from its first token" in caplog.text
    monkeypatch.undo()
    assert cached_or_recompute(model, hook, 2).saves
