"""Continuous batching against a plain forward of the same model, stepped by hand."""

import numpy as np
import pytest
import torch

from asyncrl.engines.requests import Request
from asyncrl.models.names import stream
from asyncrl.types import SamplingParams, Segment, Version
from tests.engines.support import LOUD, Stepper, plain_forward
from tests.helpers import tiny_models


def sampling(new: int, stop: tuple[int, ...] = (), greedy: bool = False, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(temperature, new, stop, greedy=greedy)


@pytest.fixture
def stepper() -> Stepper:
    return Stepper(tiny_models.qwen3_moe(**LOUD), rows=8)


def test_one_step_is_one_token_for_every_row(stepper):
    request = stepper.submit([5, 6, 7], 2, sampling(3))
    for tokens in (2, 4, 6):
        stepper.batch.step()
        assert stepper.batch.tokens == tokens
    assert not stepper.batch.busy
    assert [len(c.token_ids) for c in request.completions] == [3, 3]


def test_greedy_samples_of_one_prompt_are_equal_and_match_a_plain_forward(stepper):
    request = stepper.submit([5, 6, 7, 8, 9], 3, sampling(20, greedy=True))
    stepper.finish()
    stepper.check(request)
    assert len({tuple(c.token_ids) for c in request.completions}) == 1


def test_sampled_log_probs_are_at_the_sampling_temperature(stepper):
    request = stepper.submit([1, 2, 3], 4, sampling(12, temperature=0.6))
    stepper.finish()
    stepper.check(request)
    done = request.completions[0]
    logits, _ = plain_forward(stepper.model, stepper.hook, np.append([1, 2, 3], done.token_ids).astype(np.int32))
    at_one = torch.log_softmax(logits[2:-1], -1).gather(1, torch.from_numpy(done.token_ids).long()[:, None])[:, 0]
    assert np.abs(done.logprobs - at_one.numpy()).max() > 0.01


def test_rows_of_very_different_lengths_late_joiners_and_reused_rows(stepper):
    """12 requests over 8 rows: lengths 1 to 60, prompts 1 to 40, some greedy, joining at different steps."""
    rng = np.random.default_rng(0)
    requests = []
    for i, new in enumerate([60, 1, 2, 17, 3, 40, 5, 1, 33, 8, 21, 2]):
        prompt = rng.integers(0, 64, [1, 40, 7, 3][i % 4])
        requests.append(stepper.submit(prompt, 1 + i % 3, sampling(new, (9,), i % 2 == 0, 0.5 + 0.1 * i)))
        for _ in range(i % 4):
            stepper.batch.step()
    stepper.finish()
    for request in requests:
        stepper.check(request)
    assert len({len(c.token_ids) for r in requests for c in r.completions}) > 6


def test_row_counts_are_prompt_plus_response_minus_one(stepper):
    one, many = stepper.submit([4], 1, sampling(1)), stepper.submit([1, 2, 3, 4, 5, 6], 1, sampling(7))
    stepper.finish()
    layers, top_k = len(stepper.info.layers), stepper.info.top_k
    assert one.completions[0].routes.shape == (1, layers, top_k)
    assert many.completions[0].routes.shape == (12, layers, top_k)


def test_the_stop_token_is_kept_with_its_own_log_prob(stepper):
    # Every token but 0 stops, so some sample stops at once, and token 0 goes on.
    request = stepper.submit([3, 4], 6, sampling(5, tuple(range(1, 64))))
    stepper.finish()
    stepper.check(request)
    assert {c.finish_reason for c in request.completions} == {"stop"}
    assert all(c.token_ids[-1] != 0 and c.logprobs[-1] < -0.1 for c in request.completions)


def test_a_load_after_token_4_of_10_gives_two_segments(stepper):
    other = tiny_models.qwen3_moe(**LOUD, seed=1)
    request = stepper.submit([5, 6, 7], 1, sampling(10, greedy=True))
    for _ in range(4):
        stepper.batch.step()
    old = {name: tensor.clone() for name, tensor in stepper.model.state_dict().items()}
    stepper.load(Version(0, 8), stream(other))
    stepper.finish()
    done = request.completions[0]
    assert done.segments == (Segment(Version(0, 0), 0, 4), Segment(Version(0, 8), 4, 10))

    def under(weights, tokens):
        stepper.model.load_state_dict(weights)
        ids = np.append([5, 6, 7], tokens).astype(np.int32)
        logits, _ = plain_forward(stepper.model, stepper.hook, ids)
        at = torch.from_numpy(tokens).long()[:, None]
        return torch.log_softmax(logits[2:-1], -1).gather(1, at)[:, 0].numpy()

    before = under(old, done.token_ids)
    np.testing.assert_allclose(done.logprobs[:4], before[:4], atol=1e-5)
    assert np.abs(done.logprobs[4:] - before[4:]).min() > 1e-3


def test_two_loads_without_a_token_between_them_leave_one_segment(stepper):
    request = stepper.submit([5], 1, sampling(3))
    stepper.batch.step()
    stepper.batch.set_version(Version(0, 4))
    stepper.batch.set_version(Version(0, 8))
    stepper.finish()
    later = stepper.submit([5], 1, sampling(2))
    stepper.finish()
    assert request.completions[0].segments == (Segment(Version(0, 0), 0, 1), Segment(Version(0, 8), 1, 3))
    assert later.completions[0].segments == (Segment(Version(0, 8), 0, 2),)


def test_after_a_load_everything_equals_a_model_that_always_had_those_weights(stepper):
    other = tiny_models.qwen3_moe(**LOUD, seed=1)
    stepper.submit([9, 9, 9], 4, sampling(30))
    stepper.finish()
    stepper.load(Version(0, 1), stream(other))
    ours = stepper.submit([5, 6, 7], 2, sampling(15, greedy=True))
    stepper.finish()
    fresh = Stepper(other)
    theirs = fresh.submit([5, 6, 7], 2, sampling(15, greedy=True))
    fresh.finish()
    for a, b in zip(ours.completions, theirs.completions, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
        np.testing.assert_array_equal(a.routes, b.routes)


def test_more_samples_than_rows_are_run_in_turns_and_requests_wait_in_order():
    stepper = Stepper(tiny_models.qwen3_moe(**LOUD), rows=4)
    ended: list[Request] = []
    many, one = stepper.submit([1, 2], 10, sampling(6)), stepper.submit([3], 1, sampling(1))
    for request in (many, one):
        request.on_end = ended.append
    stepper.batch.step()
    assert len(stepper.batch.running) == 4
    stepper.finish()
    stepper.check(many)
    stepper.check(one)
    assert ended == [many, one] or ended == [one, many]
    assert stepper.batch.prompt_tokens == 3 * 2 + 1


def test_cancel_frees_the_rows_and_leaves_the_others_alone():
    stepper = Stepper(tiny_models.qwen3_moe(**LOUD), rows=6)
    gone, stays = stepper.submit([1, 2], 3, sampling(40)), stepper.submit([7, 8, 9], 3, sampling(25))
    waits = stepper.submit([4], 3, sampling(5))
    for _ in range(5):
        stepper.batch.step()
    stepper.batch.cancel(gone)
    assert gone.ended and "cancelled" in str(gone.error)
    assert len(stepper.batch.running) == 3
    stepper.batch.cancel(waits)
    stepper.batch.cancel(waits)
    late = stepper.submit([5, 5], 3, sampling(30))
    stepper.finish()
    stepper.check(stays)
    stepper.check(late)
    assert waits.completions == [] and stepper.batch.tokens == 5 * 6 + 20 * 3 + 30 * 3


def test_numbers_that_are_not_finite_fail_their_request_and_nothing_after_it(stepper):
    first_layer = stepper.model.model.layers[0].input_layernorm.weight
    kept = first_layer.detach().clone()
    bad = stepper.submit([1, 2, 3], 2, sampling(40))
    for _ in range(30):
        stepper.batch.step()
    with torch.no_grad():
        first_layer.fill_(float("nan"))
    stepper.decoder.refresh()
    stepper.batch.step()
    assert "not finite" in str(bad.error) and "0.0" in str(bad.error)
    assert not stepper.batch.busy
    with torch.no_grad():
        first_layer.copy_(kept)
    stepper.decoder.refresh()
    # The short rows lie where the poisoned ones lay, and the long one makes them look past their own end,
    # at position 32, which held NaN.
    short, long = stepper.submit([4], 3, sampling(25)), stepper.submit(range(20), 1, sampling(25))
    stepper.finish()
    stepper.check(short)
    stepper.check(long)


def test_a_seed_gives_the_same_samples_whatever_else_runs(stepper):
    params = SamplingParams(1.0, 12, (), seed=7)
    alone = stepper.submit([1, 2, 3], 2, params)
    stepper.finish()
    stepper.submit([9], 3, sampling(20))
    stepper.batch.step()
    beside = stepper.submit([1, 2, 3], 2, params)
    stepper.finish()
    for a, b in zip(alone.completions, beside.completions, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
    assert not np.array_equal(alone.completions[0].token_ids, alone.completions[1].token_ids)


def test_the_engine_s_own_stream_depends_on_its_seed_only():
    def run(seed):
        stepper = Stepper(tiny_models.qwen3_moe(**LOUD), seed=seed)
        request = stepper.submit([1, 2, 3], 2, sampling(10))
        stepper.finish()
        return [c.token_ids.tolist() for c in request.completions]

    assert run(0) == run(0) != run(1)


def test_a_growing_cache_keeps_what_running_rows_hold(stepper):
    short = stepper.submit([1, 2, 3], 2, sampling(12))
    for _ in range(6):
        stepper.batch.step()
    long = stepper.submit(range(60), 2, sampling(60))
    stepper.finish()
    stepper.check(short)
    stepper.check(long)
