"""Every decoder against a plain forward, by family; which decoder a model gets and why."""

import logging

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from asyncrl.engines.decoder import Prompts
from asyncrl.engines.flat import FlatDecoder, why_not_flat
from asyncrl.engines.module_decoder import CachedDecoder, RecomputeDecoder
from asyncrl.models.routes import RouteHook
from asyncrl.types import SamplingParams
from tests.engines.support import LOUD, Stepper
from tests.helpers import tiny_models

FLAT = ("qwen3_moe", "qwen3_moe_sparse_step", "qwen2_moe", "mixtral")


def ragged_run(stepper: Stepper) -> None:
    """6 requests over 6 rows with other lengths, some joining later, all checked."""
    rng = np.random.default_rng(0)
    requests = []
    for i, (prompt, new) in enumerate([(1, 20), (30, 2), (9, 1), (2, 25), (17, 6), (5, 12)]):
        params = SamplingParams(0.8, new, (9,), greedy=i % 2 == 0)
        requests.append(stepper.submit(rng.integers(0, 64, prompt), 2, params))
        for _ in range(2 * (i % 2)):
            stepper.batch.step()
    stepper.finish()
    for request in requests:
        stepper.check(request)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_each_family_matches_a_plain_forward(family):
    stepper = Stepper(tiny_models.FAMILIES[family](**LOUD), rows=6)
    assert isinstance(stepper.decoder, FlatDecoder if family in FLAT else CachedDecoder)
    ragged_run(stepper)


@pytest.mark.parametrize("make", [CachedDecoder, RecomputeDecoder])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_the_module_decoders_match_a_plain_forward(family, make):
    ragged_run(Stepper(tiny_models.FAMILIES[family](**LOUD), rows=6, make=make))


@pytest.mark.parametrize("make", [FlatDecoder, CachedDecoder, RecomputeDecoder])
def test_a_dense_model_decodes_without_routes(make):
    ragged_run(Stepper(tiny_models.qwen3_dense(**LOUD), rows=6, make=make, dense=True))


def test_a_dense_first_layer_has_no_routes():
    stepper = Stepper(tiny_models.qwen3_moe(**LOUD, layers=3, mlp_only_layers=(0,)), rows=6)
    assert stepper.info.layers == (1, 2)
    ragged_run(stepper)


@pytest.mark.parametrize(
    "change",
    [
        {"norm_topk_prob": False},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"attention": "eager"},
    ],
    ids=str,
)
def test_the_flat_decoder_follows_the_config(change):
    stepper = Stepper(tiny_models.qwen3_moe(**LOUD, **change), rows=6)
    assert isinstance(stepper.decoder, FlatDecoder)
    ragged_run(stepper)


def shake(model: PreTrainedModel, part: str) -> PreTrainedModel:
    """Give every parameter with `part` in its name values of its own between 0.5 and 2."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if part in name:
                weight.copy_(0.5 + 1.5 * torch.rand(weight.shape, generator=generator))
    return model


@pytest.mark.parametrize("family", FLAT)
def test_norms_that_are_not_one_are_used(family):
    ragged_run(Stepper(shake(tiny_models.FAMILIES[family](**LOUD), "norm"), rows=6))


def test_biases_of_queries_keys_and_values_are_used():
    ragged_run(Stepper(shake(tiny_models.FAMILIES["qwen2_moe"](**LOUD, qkv_bias=True), "bias"), rows=6))


def test_biases_of_all_projections_are_used():
    ragged_run(Stepper(shake(tiny_models.qwen3_moe(**LOUD, attention_bias=True), "bias"), rows=6))


def test_long_prompts_take_the_sparse_experts_and_give_the_same():
    # 1600 tokens would waste 1600 * 6 * 6 * 32 * 32 = 59e6 operations on experts that were not chosen.
    stepper = Stepper(tiny_models.qwen3_moe(**LOUD, max_position_embeddings=512), rows=4)
    rng = np.random.default_rng(0)
    requests = [stepper.submit(rng.integers(0, 64, 400), 1, SamplingParams(1.0, 3, ())) for _ in range(4)]
    stepper.finish()
    for request in requests:
        stepper.check(request)


def test_float64_matches_more_closely():
    # transformers computes RMS norms in float32 even then, so 1e-6 and not 1e-12; its grouped_mm takes no float64.
    model = tiny_models.qwen3_moe(**LOUD, dtype=torch.float64)
    model.set_experts_implementation("eager")
    stepper = Stepper(model)
    request = stepper.submit([1, 2, 3], 2, SamplingParams(1.0, 10, ()))
    stepper.finish()
    stepper.check(request, atol=1e-6)


@pytest.mark.parametrize("make", [FlatDecoder, CachedDecoder])
def test_bfloat16_stays_close_to_float32_with_the_same_weights(make):
    stepper = Stepper(tiny_models.qwen3_moe(**LOUD, dtype=torch.bfloat16), make=make)
    request = stepper.submit([1, 2, 3], 2, SamplingParams(1.0, 30, ()))
    stepper.finish()
    model = stepper.model.float()
    done = request.completions[0]
    ids = torch.from_numpy(np.append([1, 2, 3], done.token_ids)).long()
    logp = torch.log_softmax(model(ids[None]).logits[0, 2:-1], -1).gather(1, ids[3:, None])[:, 0]
    # The plain bfloat16 module is off by 0.006 on average here.
    assert np.abs(done.logprobs - logp.detach().numpy()).mean() < 0.02


def test_other_families_are_not_flat_and_the_reason_is_named():
    assert why_not_flat(tiny_models.qwen3_moe(**LOUD)) is None
    assert "'olmoe'" in str(why_not_flat(tiny_models.FAMILIES["olmoe"](**LOUD)))
    assert "sliding_window" in str(why_not_flat(tiny_models.mixtral(**LOUD, sliding_window=8)))
    assert "gelu" in str(why_not_flat(tiny_models.qwen3_moe(**LOUD, hidden_act="gelu")))
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert "'dynamic'" in str(why_not_flat(tiny_models.qwen3_moe(**LOUD, rope_parameters=rope)))


@pytest.mark.parametrize("window", [4, 12])
def test_a_sliding_window_is_kept(window):
    stepper = Stepper(tiny_models.mixtral(**LOUD, sliding_window=window), rows=6)
    assert isinstance(stepper.decoder, CachedDecoder)
    ragged_run(stepper)


def test_scaled_rope_matches():
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
    stepper = Stepper(tiny_models.qwen3_moe(**LOUD, rope_parameters=rope), rows=6)
    assert isinstance(stepper.decoder, FlatDecoder)
    ragged_run(stepper)


def test_a_family_whose_state_is_not_a_kv_cache_is_recomputed_and_says_so(caplog):
    model = tiny_models.build(
        "qwen3_next",
        **LOUD,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_hidden_layers=2,
        num_experts=8,
        num_experts_per_tok=2,
        head_dim=8,
        vocab_size=64,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    )
    with caplog.at_level(logging.WARNING):
        stepper = Stepper(model, rows=6)
    assert isinstance(stepper.decoder, RecomputeDecoder) and not isinstance(stepper.decoder, CachedDecoder)
    assert "'qwen3_next'" in caplog.text and "slowly" in caplog.text
    ragged_run(stepper)


def test_a_moved_row_goes_on_as_if_it_had_stayed():
    """Rows 0 and 1 hold two prompts; row 1 is moved to row 0 and fed alone."""
    for make in (FlatDecoder, CachedDecoder, RecomputeDecoder):
        model = tiny_models.qwen3_moe(**LOUD)
        decoder = make(model, RouteHook(model), 2)
        with torch.inference_mode():
            decoder.reserve(8)
            nobody = torch.zeros(0, dtype=torch.int64)
            prompts = Prompts(torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]]), torch.tensor([4, 2]), torch.tensor([0, 1]))
            decoder.forward(nobody, nobody, 0, prompts)
            both = decoder.forward(torch.tensor([7, 8]), torch.tensor([4, 2]), 5, None).logits_BV
            decoder.move(torch.tensor([1]), torch.tensor([0]), 2)
            alone = decoder.forward(torch.tensor([8]), torch.tensor([2]), 3, None).logits_BV
        torch.testing.assert_close(alone[0], both[1], atol=1e-6, rtol=0)
