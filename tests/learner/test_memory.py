"""What updates really hold, counted tensor by tensor, against the estimate; and what they must never make."""

import dataclasses

import numpy as np
import pytest

from asyncrl.config import validate
from asyncrl.learner.batch import rows_of
from asyncrl.learner.reference import open_reference
from asyncrl.learner.shard import build_policy
from asyncrl.learner.step import Updater
from asyncrl.learner.update import run_update
from asyncrl.models.describe import describe
from asyncrl.models.memory import Plan, estimate, read_shape
from asyncrl.types import Group, Prompt
from tests.helpers import tiny_models
from tests.helpers.live_memory import LiveMemory
from tests.learner.groups import make_trajectory

PROMPT = 4
VOCAB = 640


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = tiny_models.qwen3_moe(32, 3, 8, 4, VOCAB, max_position_embeddings=4096)
    return tiny_models.save(model, tmp_path_factory.mktemp("models") / "moe")


def rows(info, length):
    rng = np.random.default_rng(0)
    prompt = Prompt("p", rng.integers(0, info.vocab_size, PROMPT).astype(np.int32), "", "", "test")
    both = tuple(make_trajectory(f"p#{i}", PROMPT, length, info, rng, ((0, 10**9),), float(i)) for i in range(2))
    return rows_of([Group("p", prompt, "g", 0, 1.0, both, 1.0)], 0, 0, info)


def measured(
    folder, world, lengths, dtype="float32", checkpointing=False, fused=True, routes="native", reference=None
):  # fmt: skip
    """(live memory, plan) of an update of two responses for each of the lengths. reference: folder of that policy."""
    info, out = describe(folder), []
    longest = PROMPT + max(lengths)
    config = validate(
        {
            "model": {"path": str(folder), "dtype": dtype},
            "algorithm": {
                "groups_per_update": 1,
                "group_size": 2,
                "routes": routes,
                "rdc": {"mode": "observe"},
                "kl": {} if reference is None else {"coef": 0.1, "reference": str(reference)},
            },
            "learner": {
                "device": "cpu",
                "micro_batch_tokens": longest * (2 if fused else 1),
                "activation_checkpointing": checkpointing,
                "logprob_chunk": 64,
                "scoring": "auto" if fused else "separate",
            },
        }
    )
    policy = build_policy(config.model, config.learner, routes == "r3", world)
    updater = Updater(policy, config.learner, config.algorithm, world)
    frozen = open_reference(config, world)

    def update(length):
        return run_update(
            policy, updater, rows(info, length), 0, 0.0, None, config, info, world, reference=frozen
        )  # fmt: skip

    update(8)
    with LiveMemory() as live:
        for length in lengths:
            update(8)
            live.restart()
            assert update(length).fused == fused
            size = PROMPT + length
            plan = Plan(
                dtype=dtype, ranks=1, tokens=size * (2 if fused else 1), length=size, share=2 * size,
                checkpointing=checkpointing, logprob_chunk=64, device="cuda", routes_replayed=routes == "r3",
                fused=fused, reference=None if reference is None else read_shape(reference),
            )  # fmt: skip
            out.append((live.peak, live.largest, plan))
    return out


def passing(shape, plan):
    """The estimate without what was there before the update: weights and moments."""
    found = estimate(shape, plan)
    there = ("parameters", "AdamW moments", "parameters of the reference policy")
    return found.total - sum(item.bytes for item in found.always if item.name in there)


@pytest.mark.parametrize(
    ("dtype", "checkpointing", "fused", "routes"),
    [
        ("float32", False, True, "native"),
        ("bfloat16", False, False, "native"),
        ("bfloat16", True, True, "native"),
        ("float32", True, False, "r3"),
    ],
)
def test_the_estimate_is_what_an_update_holds(folder, world, dtype, checkpointing, fused, routes):
    ((peak, _, plan),) = measured(folder, world, [256], dtype, checkpointing, fused, routes)
    assert passing(read_shape(folder), plan) == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize(
    ("width", "dtype", "checkpointing", "fused"),
    [
        (32, "float32", False, True),
        (32, "float32", False, False),
        (96, "bfloat16", True, True),
        (96, "float32", True, False),
    ],
)
def test_the_estimate_knows_the_pass_of_a_reference_policy(folder, world, tmp_path, width, dtype, checkpointing, fused):
    reference = tiny_models.save(tiny_models.qwen3_moe(width, 3, 8, 4, VOCAB), tmp_path / "reference")
    ((peak, _, plan),) = measured(folder, world, [256], dtype, checkpointing, fused, reference=reference)
    shape = read_shape(folder)
    assert passing(shape, plan) == pytest.approx(peak, rel=0.1)
    there = {item.name: item.bytes for item in estimate(shape, plan).always}
    assert there["parameters of the reference policy"] == 4 * read_shape(reference).parameters
    without = passing(shape, dataclasses.replace(plan, reference=None))
    assert (without < 0.9 * peak) == (fused or width > 32), "this one shows nothing"


def test_memory_grows_linearly_and_checkpointing_saves(folder, world):
    slopes = []
    for checkpointing in (False, True):
        found = measured(folder, world, [128, 256, 512], checkpointing=checkpointing)
        peaks = [peak for peak, _, _ in found]
        first, second = (peaks[1] - peaks[0]) / 256, (peaks[2] - peaks[1]) / 512
        # Quadratic terms would double the second.
        assert second == pytest.approx(first, rel=0.03)
        slopes.append(second)
        for _, (numbers, operator, shape), plan in found:
            # Neither logits of all tokens, nor scores of all pairs of positions of the four heads.
            assert numbers < plan.tokens * VOCAB / 2, (operator, shape)
            assert not (len(shape) >= 2 and shape[-1] == shape[-2] == plan.length), (operator, shape)
    assert slopes[1] < slopes[0] / 2


def test_eager_attention_is_counted_as_all_pairs(folder):
    shape = read_shape(folder)
    base = Plan("float32", 1, 2048, 1024, 2048, False, 64, attention="eager")
    twice = dataclasses.replace(base, tokens=4096, length=2048, share=4096)
    assert passing(shape, twice) > 3 * passing(shape, base)
    linear = dataclasses.replace(base, attention="sdpa")
    longer = dataclasses.replace(twice, attention="sdpa")
    assert passing(shape, longer) < 2.1 * passing(shape, linear)


def test_live_memory_sees_a_tensor_and_its_end():
    import torch

    with LiveMemory() as live:
        held = torch.zeros(1000)
        passing_one = held * 2
        del passing_one
        view = held[:10]
    assert live.peak == 8000 and live.largest[0] == 1000 and len(view) == 10
