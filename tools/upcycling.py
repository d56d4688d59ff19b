"""The arithmetic of `upcycle.py`: a dense Llama copied into a Qwen2-MoE, and the two compared.

Axes: E experts, I intermediate, H hidden, T tokens, V vocabulary.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2MoeConfig, Qwen2MoeForCausalLM

if TYPE_CHECKING:
    from upcycle import Recipe

CARRIED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    "tie_word_embeddings", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab.*", "merges.txt", "added_tokens*")


class Comparison(NamedTuple):
    """difference: largest change of a log-prob. kl: mean KL(dense || sparse) in nats. agreement: share of the positions
    with the same likeliest token."""

    difference: float
    kl: float
    agreement: float
    tokens: int

    def __str__(self) -> str:
        return (
            f"KL to the dense model {self.kl:.4f} nats per token, same likeliest token {self.agreement:.2f}, "
            f"largest change of a log-prob {self.difference:.2g}"
        )


def load_llama(folder: Path) -> PreTrainedModel:
    """The dense model in float32. ValueError for what Qwen2-MoE cannot hold exactly."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.model_type != "llama":
        raise ValueError(f"{folder} is a {config.model_type!r}; only a 'llama' can be copied exactly")
    for field in ("attention_bias", "mlp_bias"):
        if getattr(config, field, False):
            raise ValueError(f"{folder} has {field}=true, which Qwen2-MoE has no parameters for")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def upcycle(dense: PreTrainedModel, recipe: Recipe, router_std: float) -> PreTrainedModel:
    """A Qwen2-MoE, float32, with the log-probs of the dense model: all experts of a layer are its dense MLP.

    The gate of the shared expert is 0 and so is its last matrix: it adds nothing, but it can learn.
    """
    layers = dense.config.num_hidden_layers
    if not 1 <= recipe.sparse_layers <= layers or not 1 <= recipe.top_k <= recipe.experts:
        raise ValueError(f"{recipe} does not fit {layers} layers; 1 <= sparse_layers <= layers, 1 <= top_k <= experts")
    config = Qwen2MoeConfig(
        **{field: getattr(dense.config, field) for field in CARRIED},
        moe_intermediate_size=dense.config.intermediate_size,
        shared_expert_intermediate_size=recipe.shared_size,
        num_experts=recipe.experts,
        num_experts_per_tok=recipe.top_k,
        norm_topk_prob=True,
        mlp_only_layers=list(range(layers - recipe.sparse_layers)),
        qkv_bias=False,
        use_sliding_window=False,
        use_cache=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = Qwen2MoeForCausalLM(config).float().eval()
        _copy(dense, model, router_std)
    model.generation_config = dense.generation_config
    return model


@torch.no_grad()
def _copy(dense: PreTrainedModel, model: PreTrainedModel, router_std: float) -> None:
    source, target = dense.state_dict(), model.state_dict()
    for i, layer in enumerate(model.model.layers):
        block, prefix = layer.mlp, f"model.layers.{i}.mlp."
        if not hasattr(block, "experts"):
            continue
        gate, up, down = (source.pop(f"{prefix}{name}_proj.weight") for name in ("gate", "up", "down"))
        block.experts.gate_up_proj.copy_(torch.cat((gate, up)))  # [2I, H] into each of [E, 2I, H]
        block.experts.down_proj.copy_(down)
        block.gate.weight.normal_(0.0, router_std)
        block.shared_expert.down_proj.weight.zero_()
        block.shared_expert_gate.weight.zero_()
    for name, weight in source.items():
        target[name].copy_(weight)


@torch.no_grad()
def add_noise(model: PreTrainedModel, recipe: Recipe) -> None:
    """Gaussian noise on every expert, recipe.noise standard deviations of the weight it falls on."""
    generator = torch.Generator().manual_seed(recipe.seed + 1)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            for stack in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                for expert in stack:
                    noise = torch.empty_like(expert).normal_(generator=generator)
                    expert.add_(noise, alpha=recipe.noise * float(expert.std()))


def texts(folder: Path, facts: Sequence[str], vocab_size: int) -> tuple[list[Tensor], bool]:
    """(token rows [1, T], True) of the facts; without a tokenizer random rows and False."""
    file = folder / "tokenizer.json"
    if file.is_file():
        tokenizer = Tokenizer.from_file(str(file))
        return [torch.tensor([tokenizer.encode(text, add_special_tokens=False).ids]) for text in facts], True
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (1, 32), generator=generator) for _ in facts], False


@torch.no_grad()
def log_probs(model: PreTrainedModel, row: Tensor) -> Tensor:
    """log_softmax [T, V] in float32."""
    return torch.log_softmax(model(input_ids=row, use_cache=False).logits[0].float(), dim=-1)


def compare(dense: PreTrainedModel, model: PreTrainedModel, rows: Sequence[Tensor]) -> Comparison:
    """How far the sparse model is from the dense one on these rows."""
    worst = kl = same = 0.0
    tokens = 0
    for row in rows:
        ours, theirs = log_probs(dense, row), log_probs(model, row)
        worst = max(worst, float((ours - theirs).abs().max()))
        kl += float((ours.exp() * (ours - theirs)).sum())
        same += float((ours.argmax(-1) == theirs.argmax(-1)).sum())
        tokens += row.shape[1]
    return Comparison(worst, kl / tokens, same / tokens, tokens)


def negative_log_likelihood(model: Any, rows: Sequence[Tensor]) -> float:
    """Mean over the tokens after the first of each row, nats."""
    parts = [-log_probs(model, row)[:-1].gather(1, row[0, 1:, None]) for row in rows]
    return float(torch.cat(parts).mean())


def copy_tokenizer(source: Path, folder: Path) -> None:
    """The tokenizer and its chat template, byte for byte."""
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copy2(file, folder / file.name)
