"""What an SGLang server's own checksums of its tensors may be, from the tensors that were sent to it.

The server names fused tensors: q, k and v in one, gate and up in one, all experts of a layer in one. A name has several
acceptable values, for servers on CPU (sha256) and on GPU (tile_hash) and for the ways they store a tensor. Servers that
keep experts in another order or packed are not known here. Knows no carrier.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.models.tied import EMBEDDING, HEAD
from asyncrl.weights.fp8 import dequantise
from asyncrl.weights.rollout import SCALE
from asyncrl.weights.tile_hash import tile_hash

SMALL_BYTES = 2**20
"""Tensors up to this size are in every sample."""
SAMPLE_BYTES = 2**28
"""Bytes of larger tensors in one sample; the next one takes others."""

_PAD_ROWS = 64
"""Servers pad the rows of embeddings and output matrices with zeros to a multiple of this."""
_FUSED = (
    (".qkv_proj.", (".q_proj.", ".k_proj.", ".v_proj.")),
    (".gate_up_proj.", (".gate_proj.", ".up_proj.")),
)
_EXPERTS = re.compile(r"(?P<layer>.*\.experts)\.w(?P<which>13|2)_weight")
_EXPERT_PARTS = {"13": (("gate_proj", "up_proj"), ("w1", "w3")), "2": (("down_proj",), ("w2",))}
_REPLICATED = re.compile(
    r".*(norm\d*|layernorm)\.(weight|bias)|.*\.(gate|router)\.(weight|bias|e_score_correction_bias)"
)
"""What every rank of a server holds whole: norms and routers."""


def expected(
    tensors: Mapping[str, Tensor], names: Sequence[str], ranks: int, *, turn: int = 0, sample_bytes: int = SAMPLE_BYTES
) -> dict[str, frozenset[str]]:
    """Acceptable checksums (16 hex digits) of a sample of `names`, as each of a server's `ranks` ranks reports them.

    tensors: by Hugging Face name, as sent; those with <name>_scale_inv beside them are FP8, and servers give the
    checksum of what they stand for in bfloat16. Left out are names that do not follow from the tensors, with several
    ranks all but norms and routers, and what does not fit into sample_bytes: `turn` (count it up) picks of the larger
    ones, at least one.
    """
    found = {name: _parts(tensors, name) for name in names if ranks == 1 or _REPLICATED.fullmatch(name)}
    known = {name: parts for name, parts in found.items() if parts}
    sizes = {name: sum(tensors[part].nbytes for part in parts) for name, parts in known.items()}
    return {name: _values(name, tensors, known[name]) for name in sample(sizes, turn, sample_bytes)}


def sample(sizes: Mapping[str, int], turn: int, sample_bytes: int) -> list[str]:
    """Names of the turn: all up to SMALL_BYTES, and one of the groups of at most sample_bytes that the others make.

    A tensor larger than that is a group alone. As many turns as there are groups meet every name.
    """
    small = sorted(name for name, size in sizes.items() if size <= SMALL_BYTES)
    # By a hash, not by name: a group then holds tensors of several layers and kinds.
    large = sorted(sizes.keys() - set(small), key=lambda name: (hashlib.sha256(name.encode()).digest(), name))
    groups, filled = list[list[str]](), 0
    for name in large:
        if not groups or filled + sizes[name] > sample_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += sizes[name]
    return small + (groups[turn % len(groups)] if groups else [])


def _parts(tensors: Mapping[str, Tensor], name: str) -> list[str]:
    """The sent tensors whose bytes, back to back, are the server's tensor; empty when they are not all there."""
    if name in tensors:
        return [name]
    if name == HEAD:  # the server does not tie, the sender did not say so: it must be the same matrix
        return [EMBEDDING] if EMBEDDING in tensors else []
    for fused, parts in _FUSED:
        if fused in name:
            split = [name.replace(fused, part) for part in parts]
            return split if all(part in tensors for part in split) else []
    if (expert := _EXPERTS.fullmatch(name)) is None:
        return []
    for kinds in _EXPERT_PARTS[expert["which"]]:
        found, some = list[str](), _expert(expert["layer"], 0, kinds)
        while all(part in tensors for part in some):
            found += some
            some = _expert(expert["layer"], len(found) // len(kinds), kinds)
        if found:
            return found
    return []


def _expert(layer: str, number: int, kinds: Sequence[str]) -> list[str]:
    return [f"{layer}.{number}.{kind}.weight" for kind in kinds]


def _values(name: str, tensors: Mapping[str, Tensor], parts: Sequence[str]) -> frozenset[str]:
    data = np.concatenate([_bytes(tensors, part) for part in parts])
    forms = [data]
    if name in (HEAD, EMBEDDING) or name.endswith(".embed_tokens.weight"):
        rows = tensors[parts[0]].shape[0]
        if missing := -rows % _PAD_ROWS:
            forms.append(np.concatenate([data, np.zeros(data.size // rows * missing, np.uint8)]))
    return frozenset(value for form in forms for value in (_on_cpu(form), f"{tile_hash(form):016x}"))


def _on_cpu(data: NDArray[np.uint8]) -> str:
    return hashlib.sha256(data.data).hexdigest()[:16]


def _bytes(tensors: Mapping[str, Tensor], name: str) -> NDArray[np.uint8]:
    tensor, scale = tensors[name].detach(), tensors.get(name + SCALE)
    if scale is not None:
        tensor = dequantise(tensor.cpu(), scale.detach().cpu(), torch.bfloat16)
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
