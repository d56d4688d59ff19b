"""OutputHead: read off the family's own forward; decoder_layers: whatever their attribute is called."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from asyncrl.errors import ConfigError
from asyncrl.models.head import OutputHead, decoder_layers, output_head
from tests.helpers.moe_families import build_tiny
from tests.helpers.tiny_models import build, qwen3_dense, qwen3_moe

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_hidden_layers": 2}


def dense(model_type: str, **fields: Any) -> PreTrainedModel:
    return build(model_type, implementation=None, **{**SMALL, **fields})


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: qwen3_moe(), OutputHead("lm_head", 1.0, None, False, 64)),
        (lambda: qwen3_moe(tie_word_embeddings=True), OutputHead("lm_head", 1.0, None, False, 64)),
        (lambda: build_tiny("granitemoe", logits_scaling=12.0), OutputHead("lm_head", 1 / 12, None, False, 64)),
        (lambda: build_tiny("cohere2_moe", logit_scale=0.25), OutputHead("lm_head", 0.25, None, False, 64)),
        (lambda: build_tiny("gemma4_text"), OutputHead("lm_head", 1.0, 5.0, False, 64)),
        (lambda: build_tiny("beam"), OutputHead("lm_head", 1.0, 30.0, False, 64)),
        (lambda: build_tiny("inkling_text"), OutputHead("lm_head", 1 / 24, None, False, 60)),
        (lambda: build_tiny("phimoe", lm_head_bias=True), OutputHead("lm_head", 1.0, None, True, 64)),
        (lambda: dense("gpt2", n_embd=32, n_layer=2, n_head=4), OutputHead("lm_head", 1.0, None, False, 64)),
    ],
    ids=["plain", "tied", "divided", "multiplied", "capped", "capped in float32", "padded", "bias", "gpt2"],
)
def test_head_gives_the_logits_of_the_model(model: Any, expected: OutputHead) -> None:
    live = model()
    head = output_head(live)
    assert head == expected
    ids = torch.arange(6)[None]
    with torch.no_grad():
        for parameter in live.lm_head.parameters():
            # Large enough for the soft-cap to bend.
            parameter.normal_()
        hidden = live.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        logits = live(ids).logits[0]
    torch.testing.assert_close(head.logits(hidden, *head.tensors(live)), logits, atol=1e-5, rtol=1e-5)


def test_head_needs_no_weights() -> None:
    with torch.device("meta"):
        model = type(qwen3_dense())(qwen3_dense().config)
    assert model.lm_head.weight.is_meta
    assert output_head(model) == OutputHead("lm_head", 1.0, None, False, model.lm_head.weight.shape[0])


def test_the_model_is_left_as_it_was() -> None:
    model = build_tiny("granitemoe")
    before, ids = dict(model.named_modules()), torch.arange(6)[None]
    with torch.no_grad():
        logits = model(ids).logits
        output_head(model)
        assert torch.equal(model(ids).logits, logits)
    assert dict(model.named_modules()) == before


class Sharpened(type(qwen3_dense())):  # type: ignore[misc]
    """A family whose head is no formula of ours."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * out.logits.abs().clamp(max=3.0)
        return out


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: Sharpened(qwen3_dense().config), "'qwen3' is not supported: its logits"),
        (lambda: dense("opt", ffn_dim=32, word_embed_proj_dim=16), "'opt' is not supported: its output head"),
        (lambda: qwen3_dense().model, "'qwen3' is not supported: its output matrix is NoneType"),
        (lambda: build_tiny("llama4_text"), "'llama4_text' is not supported: it has no base model"),
    ],
)
def test_other_heads_are_refused_by_name(model: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        output_head(model())


def test_decoder_layers_by_count_and_routers() -> None:
    moe, gpt2 = qwen3_moe(layers=3), dense("gpt2", n_embd=32, n_layer=2, n_head=4)
    assert decoder_layers(moe) is moe.model.layers
    assert decoder_layers(gpt2) is gpt2.transformer.h
    moe.config.num_hidden_layers = 4
    with pytest.raises(ConfigError, match="'qwen3_moe' is not supported: no list"):
        decoder_layers(moe)
