"""The engine as a generator uses it: awaited from an event loop while its thread decodes."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.engines.probe import probe
from asyncrl.engines.torch_engine import TorchEngine, _check_routes
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.models.describe import describe
from asyncrl.models.names import stream
from asyncrl.models.routes import RouteHook
from asyncrl.types import SamplingParams, Segment, Version
from tests.engines.support import LOUD, check
from tests.helpers import tiny_models
from tests.helpers.sources import Given

PROMPT = np.array([5, 6, 7], dtype=np.int32)
GREEDY = SamplingParams(1.0, 12, (), greedy=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.qwen3_moe(**LOUD), tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(folder: Path) -> Iterator[TorchEngine]:
    engine = TorchEngine(folder, version=Version(0, 0), max_rows=8, max_length=4000)
    yield engine
    engine.close()


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return dict(stream(model))


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def test_requests_of_one_loop_run_together_and_match_a_plain_forward(engine):
    params = [SamplingParams(0.7, new, (9,), greedy=new == 11) for new in (1, 40, 11, 25, 3)]
    prompts = [np.arange(1 + 3 * i, dtype=np.int32) for i in range(5)]

    async def all_of_them():
        return await asyncio.gather(*(engine.generate(p, 3, s) for p, s in zip(prompts, params, strict=True)))

    groups = run(all_of_them())
    model = tiny_models.qwen3_moe(**LOUD)
    hook = RouteHook(model)
    for prompt, group, sampling in zip(prompts, groups, params, strict=True):
        assert len(group) == 3
        for done in group:
            check(model, hook, prompt, done, sampling)
    stats = engine.stats()
    assert stats["tokens"] == sum(len(c.token_ids) for group in groups for c in group)
    assert stats["prompt_tokens"] == 1 + 4 + 7 + 10 + 13
    assert stats["running"] == stats["waiting"] == 0 and stats["busy_s"] > 0


def test_describe_says_what_the_folder_says(engine):
    info = engine.describe()
    assert (info.layers, info.num_experts, info.top_k, info.vocab_size) == ((0, 1), 8, 2, 64)
    assert engine.version == Version(0, 0)


def test_it_passes_the_probe(engine):
    done = run(probe(engine, SamplingParams(0.6, 9, (3,))))
    assert done.routes.shape == (63, 2, 2)


def test_a_load_equals_an_engine_that_started_with_those_weights(engine, tmp_path):
    other = tiny_models.qwen3_moe(**LOUD, seed=1)
    fresh = TorchEngine(tiny_models.save(other, tmp_path / "other"), version=Version(0, 4))

    async def both():
        before = await engine.generate(PROMPT, 1, GREEDY)
        await engine.load(Version(0, 4), Given(lambda: weights_of(other)))
        return before, await engine.generate(PROMPT, 1, GREEDY), await fresh.generate(PROMPT, 1, GREEDY)

    before, ours, theirs = run(both())
    fresh.close()
    assert engine.version == Version(0, 4) and engine.stats()["loads"] == 1
    np.testing.assert_array_equal(ours[0].token_ids, theirs[0].token_ids)
    np.testing.assert_array_equal(ours[0].logprobs, theirs[0].logprobs)
    np.testing.assert_array_equal(ours[0].routes, theirs[0].routes)
    # Prompt rows too: nothing of the prompt's routes under the old weights is kept.
    assert not np.array_equal(before[0].routes[:3], ours[0].routes[:3])
    assert ours[0].segments == (Segment(Version(0, 4), 0, 12),)


def test_a_load_in_mid_response_gives_two_segments(engine):
    other = tiny_models.qwen3_moe(**LOUD, seed=1)
    weights = weights_of(other)

    async def load_while_it_runs():
        task = asyncio.create_task(engine.generate(PROMPT, 1, SamplingParams(1.0, 1500, ())))
        await until(lambda: engine.stats()["tokens"] >= 5)
        await engine.load(Version(1, 0), Given(lambda: weights))
        return await task

    (done,) = run(load_while_it_runs())
    first, second = done.segments
    assert (first.version, first.start) == (Version(0, 0), 0)
    assert (second.version, second.end) == (Version(1, 0), 1500)
    assert 5 <= first.end == second.start < 1500
    model = tiny_models.qwen3_moe(**LOUD)
    ids = torch.from_numpy(np.append(PROMPT, done.token_ids[: first.end])).long()
    logp = torch.log_softmax(model(ids[None]).logits[0, 2:-1], -1).gather(1, ids[3:, None])[:, 0]
    np.testing.assert_allclose(done.logprobs[: first.end], logp.detach(), atol=1e-5)


def poisoned(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    weights["model.norm.weight"][3] = float("inf")
    return weights


def unreadable(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    raise FileNotFoundError("gone")


BAD_LOADS = {
    "missing": (lambda w: {k: v for k, v in w.items() if "norm" not in k}, "missing"),
    "extra": (lambda w: w | {"model.more": torch.zeros(1)}, "extra"),
    "shape": (lambda w: w | {"model.norm.weight": torch.zeros(3)}, "wrong shape"),
    "not finite": (poisoned, "not finite"),
    "unreadable": (unreadable, "gone"),
}


@pytest.mark.parametrize("case", BAD_LOADS)
def test_a_load_that_fails_changes_nothing(engine, case):
    break_it, message = BAD_LOADS[case]
    weights = weights_of(tiny_models.qwen3_moe(**LOUD, seed=1))

    async def before_and_after():
        before = await engine.generate(PROMPT, 1, GREEDY)
        with pytest.raises(WeightSyncError, match=message):
            await engine.load(Version(0, 4), Given(lambda: break_it(weights)))
        return before, await engine.generate(PROMPT, 1, GREEDY)

    before, after = run(before_and_after())
    assert engine.version == Version(0, 0) and engine.stats()["loads"] == 0
    np.testing.assert_array_equal(before[0].logprobs, after[0].logprobs)
    assert after[0].segments[0].version == Version(0, 0)


def test_an_older_version_is_refused_and_the_same_one_may_come_again(engine):
    weights = weights_of(tiny_models.qwen3_moe(**LOUD, seed=1))

    async def loads():
        await engine.load(Version(1, 8), Given(lambda: weights))
        await engine.load(Version(1, 8), Given(lambda: weights))
        for older in (Version(1, 4), Version(0, 99)):
            with pytest.raises(WeightSyncError, match=f"{older} is older than 1.8"):
                await engine.load(older, Given(lambda: weights))

    run(loads())
    assert engine.version == Version(1, 8)


def test_cancelling_a_caller_frees_its_rows(engine):
    complaints = []

    async def cancel_and_go_on():
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
        task = asyncio.create_task(engine.generate(PROMPT, 8, SamplingParams(1.0, 3000, ())))
        await until(lambda: engine.stats()["running"] == 8)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # All 8 rows are needed, so this can only run once they are free.
        group = await engine.generate(PROMPT, 8, GREEDY)
        del task
        gc.collect()
        return group

    group = run(cancel_and_go_on())
    assert len(group) == 8
    assert engine.stats()["tokens"] < 8 * 3000
    assert complaints == [], "an error that nobody asked for"


REFUSED = {
    "too long": (PROMPT, 1, SamplingParams(1.0, 3998, ()), r"3 tokens \+ max_new_tokens=3998 = 4001 .* 4000"),
    "empty prompt": (PROMPT[:0], 1, GREEDY, "empty"),
    "ids outside the vocabulary": (np.array([64], dtype=np.int32), 1, GREEDY, "vocabulary has 64"),
    "two dimensions": (PROMPT[None], 1, GREEDY, r"integers \[P\]"),
    "no samples": (PROMPT, 0, GREEDY, "n=0"),
    "no new tokens": (PROMPT, 1, SamplingParams(1.0, 0, ()), "max_new_tokens=0"),
    "temperature 0": (PROMPT, 1, SamplingParams(0.0, 5, ()), "greedy=True"),
    "temperature nan": (PROMPT, 1, SamplingParams(float("nan"), 5, ()), "finite"),
    "a stop token outside": (PROMPT, 1, SamplingParams(1.0, 5, (64,)), r"\[64\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_that_cannot_be_served_is_refused(engine, case):
    prompt, n, sampling, message = REFUSED[case]
    with pytest.raises(EngineError, match=message):
        run(engine.generate(prompt, n, sampling))
    assert engine.stats()["waiting"] == 0


def test_the_longest_request_that_fits_is_served(engine):
    (done,) = run(engine.generate(np.arange(64, dtype=np.int32).repeat(62), 1, SamplingParams(1.0, 32, ())))
    assert len(done.token_ids) == 32


def test_close_fails_what_waits_and_what_comes_later(folder):
    engine = TorchEngine(folder, version=Version(0, 0), max_length=4000)

    async def close_while_it_runs():
        task = asyncio.create_task(engine.generate(PROMPT, 4, SamplingParams(1.0, 3000, ())))
        await until(lambda: engine.stats()["running"] == 4)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineError, match="closed"):
            await task
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(PROMPT, 1, GREEDY)
        with pytest.raises(EngineError, match="closed"):
            await engine.load(Version(0, 1), Given(dict))

    run(close_while_it_runs())
    engine.close()


def test_a_config_that_the_modules_do_not_fit_is_refused(folder):
    model = tiny_models.qwen3_moe(**LOUD, layers=3, mlp_only_layers=(0,))
    with pytest.raises(EngineError, match=r"\(0, 1\).*\(1, 2\)"):
        _check_routes(describe(folder), RouteHook(model))


def test_after_its_limit_a_request_gives_what_is_finished_and_frees_its_rows(engine):
    async def scenario():
        # Greedy: the short request ends at once, the other one has thousands of tokens to go.
        whole = await engine.generate(PROMPT, 2, GREEDY, 3600.0)
        nothing = await engine.generate(PROMPT, 2, SamplingParams(1.0, 3000, ()), 0.0)
        waiting = await asyncio.gather(
            engine.generate(PROMPT, 8, SamplingParams(1.0, 3000, ()), 0.3),
            engine.generate(PROMPT, 4, SamplingParams(1.0, 3000, ()), 0.2),  # no row is free for it
        )
        await until(lambda: engine.stats()["running"] == 0 and engine.stats()["waiting"] == 0)
        return whole, nothing, waiting, await engine.generate(PROMPT, 8, GREEDY)

    whole, nothing, waiting, after = run(scenario())
    assert len(whole) == 2 and nothing == [] and waiting == [[], []] and len(after) == 8


def test_a_decoding_thread_that_hangs_is_an_error_and_no_endless_wait(folder):
    engine = TorchEngine(folder, version=Version(0, 0), max_rows=8, answer_s=0.3)
    go_on = threading.Event()
    try:
        engine._worker.send(lambda: go_on.wait(60))
        with pytest.raises(EngineError, match=r"the engine hangs: no decode step ended within 0\.3 s"):
            run(engine.generate(PROMPT, 2, GREEDY, 0.1))
        go_on.set()
        assert len(run(engine.generate(PROMPT, 2, GREEDY, 60.0))) == 2
    finally:
        go_on.set()
        engine.close()
