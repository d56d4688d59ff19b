"""What is trained on what: the model, the task and how responses are sampled."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from asyncrl.sections.base import SEED_MAX, NonNegative, Positive, Section


class ModelSection(Section):
    """The policy: a Hugging Face folder."""

    path: str = Field(..., min_length=1)
    """Folder with config.json, safetensors and tokenizer files."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """What both sides compute in; under bfloat16 the learner keeps float32 weights for the optimizer. float64 is for
    checks: generators then compute in float32."""
    router_dtype: Literal["checkpoint", "float32"] = "checkpoint"
    """Under dtype=bfloat16: routers compute in bfloat16 like all else, or with float32 weights and inputs, on both
    sides."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention implementation of transformers in the learner; flash_attention_2 needs a GPU and dtype=bfloat16. sdpa
    means eager for the families that have no sdpa (docs/models.md)."""
    experts: Literal["eager", "grouped_mm"] = "grouped_mm"
    """Expert implementation of transformers (batched_mm is left out: 16-21x slower on CPU)."""


class ChainSumTask(Section):
    """Sums and differences of reasoning-gym's chain_sum: for `make quickstart` with running totals, for language
    models in words (docs/smollm2.md)."""

    name: Literal["chain_sum"] = "chain_sum"
    """The task."""
    min_terms: int = Field(2, ge=2, le=8)
    """Fewest terms of a training expression."""
    max_terms: int = Field(5, ge=2, le=8)
    """Most terms of a training and of an evaluation expression."""
    digits: int = Field(1, ge=1, le=3)
    """Digits per term."""
    train_size: Positive = 8192
    """Different training prompts; the cursor starts the next epoch after the last one."""
    eval_size: Positive = 400
    """Held-out prompts; none equals a training expression."""
    eval_min_terms: int = Field(3, ge=2, le=8)
    """Fewest terms of a held-out expression (there are only 200 of 2 terms with 1 digit)."""
    seed: int = Field(1, ge=0, le=SEED_MAX)
    """Seeds the items; train and evaluation items come from disjoint index ranges."""
    template: str = Field("{question}", min_length=1)
    """What the model is told: a text in which {question} stands for the expression, such as `3+0=`."""
    chat: bool = False
    """Send that as a user's message in the chat template of the model folder."""
    answer: Literal["running_total", "last_integer"] = "running_total"
    """What is scored: the number after the last `#`, or the last integer of the response."""


class SamplingSection(Section):
    """How responses are sampled for training."""

    temperature: float = Field(1.0, ge=0.01, le=10)
    """Both sides compute log-probs at this temperature."""
    max_new_tokens: Positive = 32
    """Longest response; with the longest prompt it must fit what the model was made for."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Only 1.0: see the cross-field rules."""
    top_k: NonNegative = 0
    """Only 0 (off)."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Only 0 (off)."""
