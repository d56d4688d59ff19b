"""Which tensors a server needs, and whether those on their way are these. Reads headers of files; knows no HTTP.

SGLang ignores names that it does not know, keeps what does not come, and casts and broadcasts what has another dtype or
shape, all without an error. So everything is compared here before anything is sent.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from asyncrl.engines.base import Spec
from asyncrl.errors import WeightSyncError
from asyncrl.models.folder import INDEX, SINGLE, header
from asyncrl.models.names import some
from asyncrl.models.tied import EMBEDDING, HEAD

Needs = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype (as torch spells it) and shape of every tensor by Hugging Face name."""

_WORDS = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_WIDE = re.compile(r".*(_scale_inv|e_score_correction_bias|\.expert_bias)")
"""Floats that servers hold in float32 whatever their dtype is."""
NAMED = 3
"""Tensors that an error names of each kind."""


def needs(folder: Path, dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What a server that was started from folder with that dtype needs. ConfigError for unreadable files."""
    found = {}
    for name, stored, shape in stored_in(folder):
        wide = _WIDE.fullmatch(name) is not None
        found[name] = (("float32" if wide else dtype) if stored in _FLOATS else stored, shape)
    return found


def stored_in(folder: Path) -> list[Spec]:
    """The tensors of a model folder, from the headers of its files. ConfigError for one that is damaged."""
    return [
        (name, _WORDS.get(entry.dtype, entry.dtype), entry.shape)
        for file in _files(folder)
        for name, entry in header(file).items()
    ]


def check(specs: Iterable[Spec], wanted: Needs) -> None:
    """WeightSyncError that names what is missing, unknown, twice, or of another dtype or shape.

    An output matrix may come that the server's folder does not have, when it is as large as the embeddings: tied
    models share the two, and some servers keep two anyway.
    """
    specs = list(specs)
    twice = [name for name, count in Counter(name for name, _, _ in specs).items() if count > 1]
    came = {name: (dtype, tuple(shape)) for name, dtype, shape in specs}
    allowed = dict(wanted)
    if HEAD not in allowed and EMBEDDING in allowed and HEAD in came:
        allowed[HEAD] = allowed[EMBEDDING]
    wrong = [
        f"{name} is {_form(*came[name])} and should be {_form(*allowed[name])}"
        for name in came
        if name in allowed and came[name] != (allowed[name][0], tuple(allowed[name][1]))
    ]
    parts = (
        ("missing", [name for name in allowed if name not in came]),
        ("unknown to the server", [name for name in came if name not in allowed]),
        ("twice", twice),
        ("of another form", wrong),
    )
    faults = [f"{what}: {some(names, NAMED)}" for what, names in parts if names]
    if faults:
        raise WeightSyncError(
            f"the weights are not those of the server's model: {'; '.join(faults)}. Start the server from a folder of "
            "the same model (generator.model), with the dtype in which the learner publishes (model.dtype)"
        )


def _files(folder: Path) -> list[Path]:
    """Those that a server reads: of the index, or all."""
    index = folder / INDEX
    if (folder / SINGLE).is_file() or not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(folder / name for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise WeightSyncError(f"{index} cannot be read: {exc}") from exc


def _form(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"
