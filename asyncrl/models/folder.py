"""A model folder as files: which tensors it holds, where, in which dtype and shape. Imports no torch.

Reads config.json and the headers of safetensors files, a few kilobytes each; no weight is touched and nothing is
unpickled. Knows nothing of model classes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.errors import ConfigError

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Words of safetensors for the dtypes that weights may have, and torch's."""

INTEGERS = {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}
"""The same for what may lie beside them, as counters."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_MAX_HEADER = 100_000_000
"""The limit of the safetensors format."""

_CONVERT = "convert it with transformers: from_pretrained in a place you trust, then save_pretrained into a new folder"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".bin.index.json")


class Stored(NamedTuple):
    """One tensor of a folder. dtype: a word of torch."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def weights_of(path: str | Path) -> dict[str, Stored]:
    """Every tensor of the model folder at path, by its checkpoint name.

    Everything that keeps the folder from being loaded raises ConfigError with the file and the remedy: weights that
    are pickled, GGUF, quantised or an adapter, a file that is missing, cut off or does not hold what the index says.
    """
    folder = Path(path)
    _refuse_other_kinds(folder)
    names, indexed = _files(folder)
    found: dict[str, Stored] = {}
    for name in names:
        for key, entry in header(folder / name).items():
            if indexed is None or indexed.get(key) == name:
                found[key] = entry
    lacking = sorted(key for key in indexed or () if key not in found)
    if lacking:
        raise ConfigError(
            f"{folder}: {INDEX} names {_some(lacking)}, which the files do not hold; copy the whole folder again"
        )
    if not found:
        raise ConfigError(f"{folder}: its safetensors files hold no tensor; copy the whole folder again")
    odd = sorted(key for key, entry in found.items() if entry.dtype not in (*DTYPES.values(), *INTEGERS.values()))
    if odd:
        raise ConfigError(
            f"{folder}: {_some(odd)} is stored as {found[odd[0]].dtype}, which is quantised; save the model in "
            "float32, float16 or bfloat16 first"
        )
    return found


def header(file: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file. ConfigError when it is missing, cut off or something else."""
    entries, _ = read_header(file)
    return entries


def read_header(file: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors and the metadata of one safetensors file; errors of header()."""
    try:
        raw, data_bytes = _header_bytes(file)
    except OSError as exc:
        raise ConfigError(f"{file} cannot be read: {exc.strerror or exc}; copy the whole folder again") from exc
    try:
        tensors: dict[str, Any] = json.loads(raw)
        metadata: dict[str, str] = tensors.pop("__metadata__", None) or {}
        words = DTYPES | INTEGERS
        entries = {
            key: Stored(file.name, words.get(t["dtype"], t["dtype"]), tuple(t["shape"])) for key, t in tensors.items()
        }
        end = max((t["data_offsets"][1] for t in tensors.values()), default=0)
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise ConfigError(f"{file} is no safetensors file; copy it again") from exc
    if data_bytes < end:
        raise ConfigError(f"{file} is cut off: it lacks {end - data_bytes} bytes; copy it again")
    return entries, metadata


def _header_bytes(file: Path) -> tuple[bytes, int]:
    """The JSON of a safetensors file, and how many bytes of data follow."""
    size = file.stat().st_size
    with file.open("rb") as data:
        start = data.read(8)
        length = int.from_bytes(start, "little")
        if start.startswith(b"version"):
            raise ConfigError(f"{file} is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`")
        if len(start) < 8 or length > min(_MAX_HEADER, size - 8):
            raise ConfigError(f"{file} is no safetensors file, or cut off ({size} bytes); copy it again")
        return data.read(length), size - 8 - length


def _files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """Names of the files with weights, and the map of the index if there is one. One file goes before an index."""
    if (folder / SINGLE).is_file():
        return [SINGLE], None
    try:
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(f"{folder / INDEX} cannot be read ({exc}); copy it again") from exc
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ConfigError(f"{folder / INDEX} names {_some(outside)}, which is outside of the folder")
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ConfigError(f"{folder}: {_some(absent)} of {INDEX} is missing; copy the whole folder again")
    return names, weight_map


def _refuse_other_kinds(folder: Path) -> None:
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(f"{folder} is an adapter; merge it into its base model and save that")
    config = _config(folder)
    quantised = config.get("quantization_config")
    if isinstance(quantised, dict):
        raise ConfigError(
            f"{folder}: its weights are quantised ({quantised.get('quant_method', 'kind unknown')}); save the model in "
            "bfloat16 or float32 first (from_pretrained with dequantize, then save_pretrained)"
        )
    if config.get("transformers_weights"):
        raise ConfigError(
            f"{folder}: config.json says transformers_weights={config['transformers_weights']!r}; rename that file to "
            f"{SINGLE} and remove the field"
        )
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        return
    try:
        names = sorted(file.name for file in folder.iterdir())
    except OSError as exc:
        raise ConfigError(f"{folder} cannot be read: {exc}") from exc
    for found, why in _other_kinds(names):
        raise ConfigError(f"{folder}: its weights are {why} ({_some(found)}); {_CONVERT}")
    more = "; one of another name must be renamed" if any(n.endswith(".safetensors") for n in names) else ""
    raise ConfigError(f"{folder} holds no {SINGLE} and no {INDEX}{more}; save the model with save_pretrained")


def _other_kinds(names: list[str]) -> Iterator[tuple[list[str], str]]:
    kinds = {
        "pickled, and asyncrl never unpickles what it received": _PICKLED,
        "in GGUF, which cannot be trained": (".gguf",),
        "of another framework": (".h5", ".msgpack", ".onnx"),
    }
    for why, ends in kinds.items():
        found = [name for name in names if name.endswith(ends)]
        if found:
            yield found, why


def _config(folder: Path) -> dict[str, Any]:
    """config.json; empty when there is none to read, which asyncrl.models.describe reports."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
