"""Tiny random transformers models, built from a seed and optionally written into a folder.

Every builder returns a model in eval mode (dropout is 0 everywhere) with use_cache off. Router weights are
scaled up so that routes differ between tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_COMMON: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "use_cache": False,
}


def build(
    model_type: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    implementation: str | None = "grouped_mm",
    router_scale: float = 20.0,
    **fields: Any,
) -> PreTrainedModel:
    """A random causal language model of model_type with the given config fields."""
    config = AutoConfig.for_model(model_type, **{**_COMMON, **fields})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        chosen = {} if implementation is None else {"experts_implementation": implementation}
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention, **chosen)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("gate.weight", "router.weight")):
                    parameter.mul_(router_scale)
    model.config.use_cache = False
    return model.eval()


def qwen3_moe(
    hidden: int = 32,
    layers: int = 2,
    experts: int = 8,
    top_k: int = 2,
    vocab: int = 64,
    *,
    mlp_only_layers: tuple[int, ...] = (),
    norm_topk_prob: bool = True,
    **rest: Any,
) -> PreTrainedModel:
    """A qwen3_moe: softmax over all experts, top-k, renormalised; mlp_only_layers are dense."""
    return build(
        "qwen3_moe",
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=hidden,
        num_hidden_layers=layers,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=norm_topk_prob,
        mlp_only_layers=list(mlp_only_layers),
        vocab_size=vocab,
        head_dim=hidden // 4,
        **rest,
    )


def qwen3_dense(hidden: int = 32, layers: int = 2, vocab: int = 64, **rest: Any) -> PreTrainedModel:
    """A dense qwen3."""
    sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    return build("qwen3", vocab_size=vocab, head_dim=hidden // 4, implementation=None, **sizes, **rest)


def mixtral(
    hidden: int = 32, layers: int = 2, experts: int = 4, top_k: int = 2, vocab: int = 64, **rest: Any
) -> PreTrainedModel:
    """A mixtral, whose checkpoint names differ from its module names."""
    return build(
        "mixtral",
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_local_experts=experts,
        num_experts_per_tok=top_k,
        vocab_size=vocab,
        **rest,
    )


def deepseek_v3(
    hidden: int = 32,
    layers: int = 3,
    experts: int = 8,
    top_k: int = 2,
    vocab: int = 64,
    *,
    first_k_dense: int = 1,
    **rest: Any,
) -> PreTrainedModel:
    """A deepseek_v3: the first layers dense, sigmoid scores, group limit, shared expert, latent attention."""
    return build("deepseek_v3", **_deepseek_fields(hidden, layers, experts, top_k, vocab, first_k_dense), **rest)


def _deepseek_fields(
    hidden: int, layers: int, experts: int, top_k: int, vocab: int, first_k_dense: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": hidden,
        "num_hidden_layers": layers,
        "n_routed_experts": experts,
        "num_experts_per_tok": top_k,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": first_k_dense,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "num_mtp_layers": 0,
        "vocab_size": vocab,
    }


def _family(model_type: str, **fields: Any) -> Any:
    def make(**rest: Any) -> PreTrainedModel:
        return build(model_type, **{**fields, **rest})

    return make


_SMALL = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 3}
_QWEN = {**_SMALL, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}

FAMILIES: dict[str, Any] = {
    "qwen3_moe": qwen3_moe,
    "qwen3_moe_sparse_step": _family("qwen3_moe", **_QWEN, head_dim=8, decoder_sparse_step=2),
    "qwen2_moe": _family("qwen2_moe", **_QWEN, shared_expert_intermediate_size=32, mlp_only_layers=[1]),
    "mixtral": mixtral,
    "olmoe": _family("olmoe", **{**_SMALL, "intermediate_size": 32}, num_experts=8, num_experts_per_tok=2),
    "deepseek_v3": deepseek_v3,
    "deepseek_v2": _family(
        "deepseek_v2", **_deepseek_fields(32, 3, 8, 2, 64, 1), topk_method="group_limited_greedy", head_dim=8
    ),
    "glm4_moe": _family(
        "glm4_moe",
        **_SMALL,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        head_dim=8,
        routed_scaling_factor=1.5,
    ),
    "gpt_oss": _family(
        "gpt_oss",
        **_SMALL,
        num_local_experts=8,
        num_experts_per_tok=2,
        head_dim=8,
        sliding_window=16,
        attention="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}
"""MoE families by name; each value builds one from keyword arguments (seed, dtype, experts, ...)."""


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Write model as a Hugging Face folder and return the folder."""
    model.save_pretrained(folder)
    return folder
