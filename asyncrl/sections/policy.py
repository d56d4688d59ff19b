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
    """Dtype of the learner's parameters."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of transformers."""
    experts: Literal["eager", "grouped_mm"] = "grouped_mm"
    """Expert implementation of transformers (batched_mm is left out: 16-21x slower on CPU)."""


class ChainSumTask(Section):
    """reasoning-gym chain_sum with a running-total answer; `make quickstart` uses it."""

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
    eval_min_terms: int = Field(3, ge=3, le=8)
    """Fewest terms of a held-out expression (there are too few 2-term ones to hold out)."""
    seed: int = Field(1, ge=0, le=SEED_MAX)
    """Seeds the items; train and evaluation items come from disjoint index ranges."""


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
