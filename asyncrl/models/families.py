"""The MoE families: which are served, how each weighs its chosen experts, and why the others are refused.

Read from config.json alone, so that a run ends before any process starts. Imports no torch and no transformers; a
test holds every line against the live tiny model, and the list against the families of the installed transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.errors import ConfigError

Scores = Literal["softmax", "sigmoid", "sqrtsoftplus"]

FORMULAS: dict[str, str] = {
    "softmax_selected": "softmax over the logits of the chosen experts (the same as softmax over all, renormalised)",
    "softmax_all": "softmax over the logits of all experts, not renormalised",
    "sigmoid_selected": "sigmoid of the logit / its sum over the chosen experts",
    "sigmoid_all": "sigmoid of the logit",
    "sigmoid_shared": "sigmoid of the logit / its sum over the chosen and the shared experts",
    "sqrtsoftplus_selected": "sqrt(softplus(logit)) / its sum over the chosen experts",
}
"""Kind -> weight of a chosen expert, up to a factor that the family multiplies all weights with."""


@dataclass(frozen=True, slots=True)
class Family:
    """What is known of one served family.

    scores: what the router makes of its logits. normalised: whether weights are divided by their sum over the chosen
    experts; a string is the config field that says so, with its default in normalised_by_default. scores_field: the
    config field that names the scores. gives_probabilities: whether the first output of its router is the softmax of
    the logits; else it is the logits. packing: several responses in one row of the batch give the numbers of
    separate rows (position_ids that start again, no attention mask). sdpa: has that attention, else eager only.
    """

    scores: Scores = "softmax"
    normalised: bool | str = True
    normalised_by_default: bool = True
    scores_field: str | None = None
    shared_in_sum: bool = False
    gives_probabilities: bool = False
    packing: bool = True
    sdpa: bool = True

    def scores_in(self, config: Mapping[str, Any]) -> str:
        """What the router of a model with this (text) config makes of its logits."""
        return self.scores if self.scores_field is None else config.get(self.scores_field) or self.scores

    def formula(self, config: Mapping[str, Any]) -> str:
        """The key of FORMULAS that holds for the (text) config of a model."""
        if self.shared_in_sum:
            return f"{self.scores}_shared"
        scores = self.scores_in(config)
        if isinstance(self.normalised, bool):
            normalised = self.normalised
        else:
            value = config.get(self.normalised)
            normalised = self.normalised_by_default if value is None else bool(value)
        # Where softmax is one of several scores it is taken over the chosen logits, whatever the field says.
        if self.scores_field is not None and scores == "softmax":
            normalised = True
        return f"{scores}_{'selected' if normalised else 'all'}"


_NORM = "norm_topk_prob"
_SOFTMAX = Family()
_SOFTMAX_BY_FIELD = Family(normalised=_NORM, normalised_by_default=False)
_SIGMOID = Family("sigmoid")
_SIGMOID_BY_FIELD = Family("sigmoid", _NORM)
_HYBRID_SIGMOID = Family("sigmoid", "moe_renormalize", packing=False)

SERVED: dict[str, Family] = {
    "afmoe": Family("sigmoid", packing=False),
    "aria_text": _SOFTMAX,
    "axk1": _SIGMOID_BY_FIELD,
    "axk2": _SIGMOID_BY_FIELD,
    "bailing_hybrid": _HYBRID_SIGMOID,
    "beam": _SIGMOID_BY_FIELD,
    "cohere2_moe": Family(normalised=_NORM, scores_field="expert_selection_fn"),
    "deepseek_v2": Family(normalised=False),
    "deepseek_v3": _SIGMOID_BY_FIELD,
    "deepseek_v32": _SIGMOID_BY_FIELD,
    "deepseek_v4": Family("sqrtsoftplus", scores_field="scoring_func", packing=False, sdpa=False),
    "dots1": Family("sigmoid", _NORM, normalised_by_default=False),
    "dots3_note_text": _SIGMOID_BY_FIELD,
    "ernie4_5_moe": _SOFTMAX,
    "exaone_moe": _SIGMOID_BY_FIELD,
    "flex_olmo": _SOFTMAX_BY_FIELD,
    "flint": Family("sigmoid", _NORM, sdpa=False),
    "gemma4_text": Family(gives_probabilities=True),
    "glm4_moe": _SIGMOID_BY_FIELD,
    "glm4_moe_lite": _SIGMOID_BY_FIELD,
    "glm_moe_dsa": _SIGMOID_BY_FIELD,
    "gpt_oss": Family(packing=False, sdpa=False),
    "granitemoe": _SOFTMAX,
    "granitemoe_swa": Family(sdpa=False),
    "granitemoehybrid": Family(packing=False),
    "granitemoeshared": _SOFTMAX,
    "hunyuan_v1_moe": _SOFTMAX,
    "hy_v3": _SIGMOID,
    "hy_v4": Family("sigmoid", _NORM, sdpa=False),
    "inkling_text": Family("sigmoid", shared_in_sum=True, packing=False),
    "jamba": Family(normalised=False, packing=False),
    "kimi_linear": _HYBRID_SIGMOID,
    "kolibri1": Family("sigmoid", _NORM, normalised_by_default=False),
    "laguna": _SIGMOID,
    "lfm2_moe": Family("sigmoid", _NORM, packing=False),
    "mellum": Family(normalised=_NORM),
    "mimo_v2_flash": Family("sigmoid", _NORM, sdpa=False),
    "minimax": Family(packing=False),
    "minimax_m2": _SIGMOID,
    "minimax_m3_vl_text": _SIGMOID,
    "mixtral": _SOFTMAX,
    "nemotron_h": Family("sigmoid", _NORM, packing=False),
    "olmoe": _SOFTMAX_BY_FIELD,
    "qwen2_moe": _SOFTMAX_BY_FIELD,
    "qwen3_5_moe_text": Family(packing=False),
    "qwen3_moe": _SOFTMAX_BY_FIELD,
    "qwen3_next": Family(normalised=_NORM, packing=False),
    "qwen4_exp_text": Family(normalised=_NORM, packing=False),
    "solar_open": _SIGMOID_BY_FIELD,
}
"""Model type -> its family; every one also has activation checkpointing and right-padded batches."""

_COMBINED = "is a multimodal checkpoint; save its text model into a folder of its own"
_WITHOUT_CLASS = """
    aria deepseek_ocr2 deepseek_ocr2_encoder deepseek_ocr2_sam_vision_model deepseek_ocr2_text deepseek_ocr2_vision
    diffusion_gemma diffusion_gemma_text dots3_note_audio_encoder dots3_note_vision_encoder ernie4_5_vl_moe
    ernie4_5_vl_moe_text ernie4_5_vl_moe_vision gemma4_audio gemma4_vision glm4v_moe glm4v_moe_text glm4v_moe_vision
    glm5_next glm5_next_text glm5_next_vision granite_docling granite_docling_text granite_docling_vision hy_v4_vl
    hy_v4_vl_text hy_v4_vl_vision inkling2 inkling2_loop inkling2_vision inkling_audio inkling_mm_model
    inkling_vision llama4_vision_model minimax_m3_vl minimax_m3_vl_vision mistral4 mistral_large4
    mistral_large4_text muse_spark muse_spark_audio muse_spark_text muse_spark_vision nllb-moe openai_privacy_filter
    qwen3_5_moe_vision qwen3_omni_moe qwen3_omni_moe_audio_encoder qwen3_omni_moe_talker_code_predictor
    qwen3_omni_moe_talker_text qwen3_omni_moe_text qwen3_omni_moe_thinker qwen3_omni_moe_vision_encoder qwen3_vl_moe
    qwen3_vl_moe_text qwen3_vl_moe_vision qwen4_exp_vision step3p5 step3p5_vision step3p7 switch_transformers
    unlimited_ocr unlimited_ocr_sam_vision_model unlimited_ocr_text unlimited_ocr_vision
    unlimited_ocr_vision_encoder
"""

REFUSED: dict[str, str] = {
    "dbrx": "takes its top-k in the block, not in its router, where routes are replayed",
    "doge": "ranks products of two key sets, so the numbers of its top-k are not those of experts",
    "inkling2_loop_text": "runs the same layers several times per token, so a layer has several routes per token",
    "inkling2_text": "pads its output matrix when it is saved, and the weight stream only moves values",
    "jetmoe": "has two routers per layer, one of them in attention",
    "lara_mini": "is saved with several of its tensors joined into one, and the weight stream only splits tensors",
    "llama4_text": "gives its experts every token, scaled, and its base model cannot be reached",
    "longcat_flash": "has zero-computation experts beside the real ones, whose ids its config does not count",
    "phimoe": "draws its experts at random in training (sparsemixer) and has no top-k",
    "zaya": "has a skip expert and a router over [batch, position, expert]",
    **dict.fromkeys(("dots3_note", "gemma4", "llama4", "qwen3_5_moe", "qwen4_exp"), _COMBINED),
    **dict.fromkeys(_WITHOUT_CLASS.split(), "has no causal language model class in transformers"),
}
"""Model type -> why it cannot be served, as the end of a sentence that begins with its name."""


def family_of(model_type: str) -> Family:
    """The family of an MoE model. Raises ConfigError naming the model type and the reason when it is not served."""
    known = SERVED.get(model_type)
    if known is None:
        reason = REFUSED.get(model_type, "is a Mixture-of-Experts family that no test of this version covers")
        raise ConfigError(f"model type {model_type!r} {reason}; docs/models.md lists the families that are served")
    return known


def attention_of(model_type: str, asked: str) -> str:
    """The attention implementation to load with: asked, but eager where a family has no sdpa."""
    known = SERVED.get(model_type)
    return "eager" if asked == "sdpa" and known is not None and not known.sdpa else asked
