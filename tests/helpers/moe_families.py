"""A tiny configuration of every MoE family of the installed transformers, and the list of those families.

The list comes from transformers itself, so that a family that a new version adds shows up in a test. Every
configuration takes what fits of one set of small sizes; a few need fields of their own.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.helpers.tiny_models import build

_ROUTER = re.compile(r"\"router_logits\":|class \w*(Router|Gating)\(")


@cache
def moe_model_types() -> frozenset[str]:
    """Every model type of transformers whose modeling code has a router."""
    root = Path(transformers.__file__).parent / "models"
    found = set()
    for model_type in CONFIG_MAPPING:
        folder = root / CONFIG_MAPPING[model_type].__module__.split(".")[2]
        if any(_ROUTER.search(file.read_text()) for file in folder.glob("modeling_*.py")):
            found.add(model_type)
    return frozenset(found)


def causal_moe_types() -> frozenset[str]:
    """Those for which AutoModelForCausalLM has a class."""
    return frozenset(t for t in moe_model_types() if t in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "intermediate_size_mlp": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_experts_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "dense_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "sliding_window": 4,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_expert_group": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "index_head_dim": 8,
    "index_n_heads": 16,
    "index_topk": 4,
    "num_nextn_predict_layers": 0,
}

_LATENT = {"num_key_value_heads": 4}
_DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
_LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 4}
_INKLING: dict[str, Any] = {
    "unpadded_vocab_size": 60,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 4,
    "rel_extent": 16,
    "d_rel": 4,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
}

_OWN: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "axk2": {**_LATENT, "layer_types": ["indexed_attention"] * 3},
    "beam": _DENSE_FIRST,
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {**_LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT,
    "deepseek_v32": {**_LATENT, **_DENSE_FIRST},
    "deepseek_v4": {
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 4},
        "num_key_value_heads": 1,
        "o_groups": 2,
        "o_lora_rank": 8,
        "head_dim": 16,
        "hc_mult": 2,
        "partial_rotary_factor": 0.5,
    },
    "doge": {"is_moe": True, "num_experts": 16},
    "dots3_note_text": {**_LATENT, **_DENSE_FIRST, "layer_types": ["indexed_attention"] * 3},
    "flint": {"mlp_only_layers": [0]},
    "gemma4_text": {
        "enable_moe_block": True,
        "top_k_experts": 2,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 5.0,
        "vocab_size_per_layer_input": 64,
        "per_layer_config": {},
    },
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": {**_LATENT, **_DENSE_FIRST},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "granitemoe": {"logits_scaling": 3.0},
    "granitemoe_swa": {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "layer_rope_theta": [10000.0] * 3,
        "logits_scaling": 3.0,
    },
    "granitemoehybrid": {**_MAMBA, **_LINEAR, "logits_scaling": 3.0},
    "granitemoeshared": {"logits_scaling": 3.0},
    "hy_v4": _LATENT,
    "inkling_text": {**_INKLING, **_DENSE_FIRST},
    "inkling2_text": {**_INKLING, "n_layers_per_attn_res_block": 2},
    "inkling2_loop_text": {
        **_INKLING,
        "n_layers_per_attn_res_block": 2,
        "num_hidden_layers": 4,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
        "loop_num_passes": 2,
        "loop_gate_rank": 4,
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 0,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
    "jetmoe": {"kv_channels": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "llama4_text": {"moe_layers": [1, 2], "attention_chunk_size": 4},
    "longcat_flash": {
        **_LATENT,
        "num_layers": 2,
        "ffn_hidden_size": 32,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 2,
    },
    "mimo_v2_flash": {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    "minimax": {**_LINEAR, "block_size": 4},
    "minimax_m3_vl_text": {**_DENSE_FIRST, "rotary_dim": 8},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "num_hidden_layers": 4,
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "chunk_size": 4,
    },
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_next": {**_LINEAR, "mlp_only_layers": [0]},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "hc_count": 2,
        "hc_lowrank": 8,
        "ple_embed_dim": 8,
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 8},
}

_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2_moe sigmoid": ("cohere2_moe", {"expert_selection_fn": "sigmoid"}),
    "deepseek_v2 greedy": ("deepseek_v2", {"topk_method": "greedy", "first_k_dense_replace": 0}),
    "deepseek_v3 one group": ("deepseek_v3", {"n_group": 1, "norm_topk_prob": False}),
    "olmoe normalised": ("olmoe", {"norm_topk_prob": True}),
    "qwen3_moe every second layer": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen3_moe normalised": ("qwen3_moe", {"norm_topk_prob": True, "tie_word_embeddings": True}),
    "qwen3_next not normalised": ("qwen3_next", {"norm_topk_prob": False}),
}
"""Name -> model type and fields that take another branch of a family's router, head or layer rule."""


_SMALL_ROUTERS = ("router.gate.weight", "router.proj.weight", "router.classifier.weight")


def variants() -> list[str]:
    """Names of the variants that build() knows besides model types."""
    return list(_VARIANTS)


def build_tiny(name: str, **more: Any) -> PreTrainedModel:
    """The tiny random model of a model type or variant, in eval mode.

    sdpa attention and grouped_mm experts where the family has them, else eager and its only implementation.
    """
    model_type, own = _VARIANTS.get(name, (name, {}))
    known = CONFIG_MAPPING[model_type]().to_dict()
    fields = {key: value for key, value in _SIZES.items() if key in known}
    fields |= {**_OWN.get(model_type, {}), **own, **more}
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    fields.setdefault("attention", "sdpa" if cls._supports_sdpa else "eager")
    fields.setdefault("implementation", "grouped_mm" if cls._can_set_experts_implementation() else None)
    model = build(model_type, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # Where build() or the family leaves zeros or small numbers, every token would take the same route.
            if name.endswith(_SMALL_ROUTERS):
                nn.init.normal_(tensor, std=0.4)
            elif name.endswith(("correction_bias", "expert_bias")):
                nn.init.normal_(tensor, std=0.05)
    return model
