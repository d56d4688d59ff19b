"""How many bytes a learner's rank needs for an update, from the model's config.json and the settings. Imports no torch.

The terms are those of docs/memory.md: what autograd keeps per token follows from the modules of transformers' decoder
layers, and a test counts it in real updates. Attention is taken to be full and exact without the matrix of all pairs
(sdpa), or eager; families with other mixers (linear attention, state space) are counted as if they had attention.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.errors import ConfigError
from asyncrl.models.describe import describe, read_config
from asyncrl.models.folder import weights_of

GIB = 2**30
OPERATORS = 64 * 2**20
"""What operators on a CPU allocate inside, in bfloat16 three times it; measured (docs/memory.md), not derived."""
BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_QK_NORM = ("qwen3", "olmo", "flex_olmo", "glm4_moe", "hunyuan", "dots1", "exaone_moe", "afmoe", "minimax_m2", "gemma")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder. dense and expert: inner widths of an MLP; shared: of the shared experts together.

    q_lora, kv_lora: ranks of latent attention, 0 without. parameters: of the whole model; layer_parameters: of its
    largest decoder layer; root_parameters: of what is in no layer.
    """

    hidden: int
    vocab: int
    layers: int
    moe_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    qk_norm: bool
    q_lora: int
    kv_lora: int
    dense: int
    expert: int
    shared: int
    experts: int
    top_k: int
    tied: bool
    parameters: int = 0
    layer_parameters: int = 0
    root_parameters: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a rank does in an update. tokens: padded tokens of a micro-batch; length: the longest row in tokens.

    share: tokens of the rank in one update. fused: scoring and update share the forward of the whole share. reference:
    sizes of the reference policy of a KL term, None without one.
    """

    dtype: str
    ranks: int
    tokens: int
    length: int
    share: int
    checkpointing: bool
    logprob_chunk: int
    block_numbers: int = 2**25
    device: str = "cpu"
    attention: str = "sdpa"
    router_dtype: str = "checkpoint"
    routes_replayed: bool = False
    routers_compared: bool = False
    fused: bool = False
    reference: Shape | None = None


class Item(NamedTuple):
    """A line of the estimate: what, and how many bytes."""

    name: str
    bytes: int


class Estimate(NamedTuple):
    """Bytes of one rank: what is always there, and what the fullest moment of an update adds."""

    always: list[Item]
    moment: str
    then: list[Item]

    @property
    def total(self) -> int:
        """The peak in bytes."""
        return sum(item.bytes for item in (*self.always, *self.then))


def read_shape(path: str | Path) -> Shape:
    """Sizes of the model folder at path: from config.json, and from the headers of its safetensors when it has them.

    Without weights the parameters are counted by the sizes. Raises ConfigError naming the file.
    """
    config = read_config(Path(path))
    info = describe(path)
    shape = shape_of(config, len(info.layers), info.num_experts, info.top_k)
    if not any(Path(path).glob("*.safetensors")):
        return shape
    units: dict[int, int] = {}
    for name, stored in weights_of(path).items():
        found = _LAYER.search(name)
        unit = int(found.group(1)) if found else -1
        # Layers beyond the decoder are heads for multi-token prediction, which are not loaded.
        if unit < shape.layers and not (shape.tied and name.endswith("lm_head.weight")):
            units[unit] = units.get(unit, 0) + math.prod(stored.shape)
    layers = max((count for unit, count in units.items() if unit >= 0), default=0)
    return replace(shape, parameters=sum(units.values()), layer_parameters=layers, root_parameters=units.get(-1, 0))


def shape_of(config: dict[str, Any], moe_layers: int, experts: int, top_k: int) -> Shape:
    """Sizes by the fields of a config.json. Raises ConfigError naming a field that is missing."""
    inner = config.get("text_config")
    text: dict[str, Any] = {**config, **inner} if isinstance(inner, dict) else config

    def size(*names: str, default: int | None = None) -> int:
        for name in names:
            value = text.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return int(value)
        if default is None:
            raise ConfigError(f"config.json has no {names[0]}: its memory cannot be estimated")
        return default

    hidden, heads = size("hidden_size", "n_embd", "d_model"), size("num_attention_heads", "n_head")
    kv_lora, nope = size("kv_lora_rank", default=0), size("qk_nope_head_dim", default=0)
    head_dim = nope + size("qk_rope_head_dim", default=0) if kv_lora else size("head_dim", default=hidden // heads)
    dense = size("intermediate_size", "ffn_hidden_size", default=4 * hidden)
    expert = size("moe_intermediate_size", "expert_ffn_hidden_size", default=dense) if experts else 0
    shared = size("shared_expert_intermediate_size", "shared_intermediate_size", default=0) if experts else 0
    shared = shared or (size("n_shared_experts", "num_shared_experts", default=0) * expert if experts else 0)
    shape = Shape(
        hidden=hidden,
        vocab=size("vocab_size"),
        layers=size("num_hidden_layers", "n_layer", "num_layers"),
        moe_layers=moe_layers,
        heads=heads,
        kv_heads=size("num_key_value_heads", default=heads),
        head_dim=head_dim,
        value_dim=size("v_head_dim", default=head_dim) if kv_lora else head_dim,
        qk_norm=bool(text.get("use_qk_norm", str(text.get("model_type", "")).startswith(_QK_NORM))),
        q_lora=size("q_lora_rank", default=0),
        kv_lora=kv_lora,
        dense=dense,
        expert=expert,
        shared=shared,
        experts=experts,
        top_k=top_k,
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
    )
    return _counted(shape, nope)


def _counted(s: Shape, nope: int) -> Shape:
    """With parameter counts by the sizes: matrices, norms and routers, no biases."""
    h, q, kv = s.hidden, s.heads * s.head_dim, s.kv_heads * s.head_dim
    if s.kv_lora:
        rope = s.head_dim - nope
        queries = h * s.q_lora + s.q_lora + s.q_lora * q if s.q_lora else h * q
        keys = h * (s.kv_lora + rope) + s.kv_lora + s.kv_lora * s.heads * (nope + s.value_dim)
        attention = queries + keys + s.heads * s.value_dim * h
    else:
        attention = h * (q + 2 * kv) + q * h + (2 * s.head_dim if s.qk_norm else 0)
    attention += 2 * h
    sparse = attention + s.experts * (3 * h * s.expert + h) + 3 * h * s.shared
    dense = attention + 3 * h * s.dense
    root = s.vocab * h * (1 if s.tied else 2) + h
    total = root + s.moe_layers * sparse + (s.layers - s.moe_layers) * dense
    largest = max(sparse if s.moe_layers else 0, dense if s.moe_layers < s.layers else 0)
    return replace(s, parameters=total, layer_parameters=largest, root_parameters=root)


def kept_per_token(s: Shape, p: Plan, sparse: bool) -> int:
    """Bytes that autograd keeps of one decoder layer per token, without checkpointing."""
    d = BYTES[p.dtype]
    # A norm: its input in float32, the normed and the scaled output. At float32 the input is the residual itself.
    norm = 4 + 2 * d
    kept = 2 * norm * s.hidden + _attention(s, p, norm, d)
    if not sparse:
        return kept + 4 * s.dense * d
    kept += 4 * s.experts + (4 * s.hidden if p.router_dtype == "float32" and d == 2 else 0)
    # Per chosen expert: its input, gate and up, their activation and product, its output; four orders and a weight.
    kept += s.top_k * ((2 * s.hidden + 4 * s.expert) * d + 4 * 8 + 3 * d)
    return kept + (4 * s.shared + (s.hidden if s.shared else 0)) * d


def _attention(s: Shape, p: Plan, norm: int, d: int) -> int:
    q, kv, out = s.heads * s.head_dim, s.kv_heads * s.head_dim, s.heads * s.value_dim
    if s.kv_lora:
        # The up-projection of the latent holds values and keys; keys are then joined with their rotary part.
        kept = norm * (s.q_lora + s.kv_lora) + 2 * q * d + s.heads * s.head_dim * d + 2 * out * d
    else:
        # With norms on queries and keys: what they keep, and the rotated result.
        kept = ((4 + d if s.qk_norm else 0) + d) * (q + kv) + kv * d + out * d
    if _all_pairs(s, p):
        # Every row's scores, after softmax in float32 and as computed with; keys and values for every head.
        scores = s.heads * p.length * (4 + (d if d == 2 and p.attention == "eager" else 0))
        return kept + scores + (2 * q * d if s.kv_heads < s.heads else 0)
    return kept + 4 * s.heads


def _all_pairs(s: Shape, p: Plan) -> bool:
    """Attention holds the scores of all pairs of positions; on a CPU sdpa does when values are not as wide as keys."""
    return p.attention == "eager" or (p.attention == "sdpa" and p.device == "cpu" and s.value_dim != s.head_dim)


def activations(s: Shape, p: Plan) -> tuple[int, int, int]:
    """(kept at the end of the forward, most of one layer, backward scratch of a layer) in bytes of a micro-batch.

    With checkpointing the second is what the recomputation of one layer adds; without, it is part of the first.
    """
    d, n = BYTES[p.dtype], p.tokens
    layers = {kept_per_token(s, p, sparse): count for sparse, count in _kinds(s) if count}
    one = max(layers) * n
    if p.checkpointing:
        # Layer inputs, and routes in 16 bits for the recomputation.
        kept = n * (s.layers * s.hidden * d + s.moe_layers * s.top_k * 2)
    else:
        kept = sum(size * count for size, count in layers.items()) * n
    # Gradients of the experts' outputs before they are put back in order, three times; or of an MLP's inner width.
    scratch = 3 * n * d * max(s.top_k * s.hidden if s.moe_layers else 0, s.dense if s.moe_layers < s.layers else 0)
    if _all_pairs(s, p):
        scratch = max(scratch, 2 * n * s.heads * p.length * 4)
    return kept, one, scratch


def _forward_layer(s: Shape, p: Plan) -> int:
    """Bytes inside a layer without graph: the experts' inputs, gate and up, activation and product; the residual."""
    sparse = s.top_k * (s.hidden + 4 * s.expert) + 4 * s.shared if s.moe_layers else 0
    wide = max(sparse, 4 * s.dense if s.moe_layers < s.layers else 0) * BYTES[p.dtype]
    return p.tokens * (max(wide, s.heads * p.length * 4 if _all_pairs(s, p) else 0) + 4 * s.hidden * BYTES[p.dtype])


def _kinds(s: Shape) -> tuple[tuple[bool, int], tuple[bool, int]]:
    return (True, s.moe_layers), (False, s.layers - s.moe_layers)


def _head(s: Shape, p: Plan) -> int:
    """The final norm, the rows that predict and their gradient; blocks of logits; the output matrix' gradient."""
    d = BYTES[p.dtype]
    wide = max(4, d)
    logits = _logits(s, p)
    # The block before is freed only when the next one is there; its weights and their gradient are wide.
    backward = 2 * logits + _columns(s, p) * s.hidden * wide * (2 if d == 2 else 1) + 2 * s.vocab * s.hidden * d
    return max(3 * logits, backward) + _predicting(s, p) + p.tokens * s.hidden * wide


def _forward_head(s: Shape, p: Plan) -> int:
    """The same without a backward pass."""
    return 3 * _logits(s, p) + _predicting(s, p)


def _predicting(s: Shape, p: Plan) -> int:
    """The final norm, and the rows that predict."""
    return p.tokens * s.hidden * (4 + 3 * BYTES[p.dtype])


def _columns(s: Shape, p: Plan) -> int:
    rows = min(p.logprob_chunk, p.tokens)
    return min(s.vocab, max(1, p.block_numbers // max(1, rows, s.hidden)))


def _logits(s: Shape, p: Plan) -> int:
    """A block of logits."""
    return min(p.logprob_chunk, p.tokens) * _columns(s, p) * max(4, BYTES[p.dtype])


def _batch(s: Shape, p: Plan) -> int:
    """Tensors of the rank's rows on the device: ids, targets, mask, log-probs, entropy; routes of one micro-batch."""
    routes = s.moe_layers * s.top_k
    replayed = p.share * routes * 2 if p.routes_replayed else 0
    # Ids in 16 bits and log-scores of one micro-batch, of the scoring pass of the take.
    replayed += p.tokens * routes * (2 + 4) if p.routers_compared else 0
    return p.share * (8 + 8 + 1 + 4 * 4) + p.tokens * routes * (2 + 8) + replayed


def estimate(s: Shape, p: Plan) -> Estimate:
    """Peak bytes of one rank in an update of the given plan, at its fullest moment."""
    wide = max(4, BYTES[p.dtype])
    shard = math.ceil(s.parameters / p.ranks)
    always = [
        Item("parameters", shard * wide),
        Item("AdamW moments", 2 * shard * wide),
        Item("batch and routes", _batch(s, p)),
    ]
    if p.reference is not None:
        always.append(Item("parameters of the reference policy", math.ceil(p.reference.parameters / p.ranks) * wide))
    moments = {
        "log-probs": _at_head(s, p),
        "backward of the top layer": _in_layer(s, p, 0),
        "backward of the layer below the top": _in_layer(s, p, min(1, s.layers - 1)),
        "backward of the bottom layer": _in_layer(s, p, s.layers - 1),
        "pass for the native drift": _at_native_pass(s, p),
        "pass of the reference policy": _at_reference(s, p),
        "reduction of the root's gradients": [
            Item("gradients", shard * wide),
            Item("gradients being reduced", s.root_parameters * wide),
        ],
    }
    moment, then = max(moments.items(), key=lambda pair: sum(item.bytes for item in pair[1]))
    if p.device == "cpu":
        then.append(Item("buffers inside operators", OPERATORS * (3 if p.dtype == "bfloat16" else 1)))
    return Estimate(always, moment, [item for item in then if item.bytes])


def _several(p: Plan) -> bool:
    """Gradients of earlier micro-batches are there all the time."""
    return p.share > p.tokens and not p.fused


def _at_head(s: Shape, p: Plan) -> list[Item]:
    d, wide = BYTES[p.dtype], max(4, BYTES[p.dtype])
    return [
        Item("gradients", math.ceil(s.parameters / p.ranks) * wide if _several(p) else 0),
        Item("whole weights", (s.root_parameters + (s.layer_parameters if p.ranks > 1 else 0)) * d),
        Item("activations", activations(s, p)[0]),
        Item("scratch of the log-probs", _head(s, p)),
    ]


def _at_native_pass(s: Shape, p: Plan) -> list[Item]:
    """Under R3 and R2 a forward without graph on native routes, while the graph of a fused pass waits."""
    if not (p.routes_replayed and p.fused):
        return []
    kept, one, _ = activations(s, p)
    d = BYTES[p.dtype]
    return [Item("whole weights", (s.root_parameters + s.layer_parameters) * d), Item("activations", kept + one)]


def _at_reference(s: Shape, p: Plan) -> list[Item]:
    """A forward without graph of the reference, while the graph of a fused pass waits with its last logits."""
    if p.reference is None:
        return []
    d, r, kept = BYTES[p.dtype], p.reference, 0
    if p.fused:
        kept = activations(s, p)[0] + _logits(s, p) + _predicting(s, p)
    return [
        Item("whole weights", (s.root_parameters + r.root_parameters + r.layer_parameters) * d),
        Item("activations", kept),
        Item("a layer or the log-probs of the reference", max(_forward_layer(r, p), _forward_head(r, p))),
    ]


def _in_layer(s: Shape, p: Plan, done: int) -> list[Item]:
    """Inside the backward of a layer, after that of `done` layers above it."""
    d, wide = BYTES[p.dtype], max(4, BYTES[p.dtype])
    kept, one, scratch = activations(s, p)
    left = kept * (s.layers - done) // s.layers
    reduced = s.parameters if _several(p) else done * s.layer_parameters
    # Several ranks gather the next layer meanwhile; the gradients of the layer above are being reduced.
    gathered = 2 if p.ranks > 1 and done < s.layers - 1 else 1
    return [
        Item("gradients", math.ceil(reduced / p.ranks) * wide),
        Item("gradients being reduced", s.layer_parameters * wide if done else 0),
        Item("whole weights", (s.root_parameters + gathered * s.layer_parameters) * d),
        Item("whole gradients of the head and a layer", (s.vocab * s.hidden + s.layer_parameters) * d),
        Item("activations", left + (one if p.checkpointing else 0)),
        Item("scratch of a layer", scratch),
    ]
