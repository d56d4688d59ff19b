"""The model, and how its responses are sampled."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from asyncrl.sections.base import NonNegative, Positive, Section


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
