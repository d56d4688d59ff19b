"""Checks of what SGLang servers need: their program, keys, model folder and the folder of their weights.

Starts nothing and imports nothing of SGLang.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.engines.sglang.command import program
from asyncrl.engines.sglang.key_files import read_key
from asyncrl.errors import ConfigError
from asyncrl.models.describe import max_length, read_config, text_config
from asyncrl.models.folder import INDEX, SINGLE

RESERVED = 2
"""Tokens of its context that a server keeps for itself: it would cut a response that needs them."""
_BLOCK = [128, 128]
_INSTALL = (
    "install it with `pip install asyncrl[sglang]`, or name an interpreter that has it in generator.sglang.command "
    "(docs/sglang.md)"
)


def faults(config: Config, weights: bool, starts: bool) -> list[str]:
    """A sentence for everything that is wrong, with key, value and remedy.

    weights: look at the model folder of the servers as well. starts: generators run on this host.
    """
    found = list(_model(config)) if weights else []
    if starts:
        found += [*_keys(config), *(_command(config) if not config.generator.sglang.urls else ())]
    return found


def longest(config: Config) -> int:
    """Most tokens of prompt and response that the model and a server with these flags can hold."""
    args = {key.replace("_", "-"): value for key, value in config.generator.sglang.args.items()}
    limits = [max_length(config.model.path, at_most=None)]
    limits += [v for k in ("context-length", "max-total-tokens") if isinstance(v := args.get(k), int) and v > 0]
    return min(limits) - RESERVED


def _keys(config: Config) -> Iterator[str]:
    for key in ("key_file", "admin_key_file"):
        file = getattr(config.generator.sglang, key)
        try:
            if file is not None:
                read_key(file, f"generator.sglang.{key}")
        except ConfigError as exc:
            yield str(exc)


def _command(config: Config) -> Iterator[str]:
    command = config.generator.sglang.command
    first, *rest = program(command)
    found = shutil.which(first)
    if found is None:
        where = "is not there, or not executable" if "/" in first else "is not on the PATH"
        yield f"generator.sglang.command={list(command)}: {first!r} {where}; {_INSTALL}"
    elif rest[:1] == ["-m"] and rest[1:2] and Path(found) == Path(sys.executable):
        package = rest[1].partition(".")[0]
        if importlib.util.find_spec(package) is None:
            yield f"generator.sglang.command={list(command)}: this Python has no {package}; {_INSTALL}"


def _model(config: Config) -> Iterator[str]:
    """The folder that servers start from must be of the kind that is sent to them."""
    key = "model.path" if config.generator.model is None else "generator.model"
    path = Path(config.generator.model or config.model.path)
    # model.path itself is the learner's too, which asks for more.
    if config.generator.model and not (path / SINGLE).is_file() and not (path / INDEX).is_file():
        yield f"{key}={str(path)!r} holds no {SINGLE} and no {INDEX}; servers start from its weights: copy them there"
        return
    if config.weights.carrier not in ("collective", "disk"):
        return
    found = read_config(path)
    if found.get("model_type") == "qwen3_moe" and (
        found.get("mlp_only_layers") or found.get("decoder_sparse_step", 1) != 1
    ):
        yield (
            f"{key}={str(path)!r} is a qwen3_moe with dense layers (mlp_only_layers or decoder_sparse_step), of which "
            "SGLang 0.5.23 makes mixtures, dropping their weights without a word; set generator.engine=torch"
        )
    kind = found.get("quantization_config")
    if config.weights.quantize == "none" and kind:
        yield (
            f"{key}={str(path)!r} is quantised ({_kind(kind)}), and weights.quantize=none sends weights as they are "
            "trained; set weights.quantize=fp8_block, or generator.model to a folder that is not quantised"
        )
    if config.weights.quantize == "fp8_block" and not _is_fp8_block(kind):
        yield (
            f"{key}={str(path)!r} is {_kind(kind)}, and weights.quantize=fp8_block sends FP8 with a scale per "
            "128 x 128 block; set generator.model to such a checkpoint of the model, or weights.quantize=none"
        )
    if config.weights.quantize == "fp8_block":
        yield from _split(config, found)


def _split(config: Config, found: dict[str, Any]) -> Iterator[str]:
    """Each tensor-parallel rank must have whole blocks of every expert: SGLang refuses to start otherwise."""
    args = {key.replace("_", "-"): value for key, value in config.generator.sglang.args.items()}
    ranks = int(args.get("tp-size", args.get("tensor-parallel-size", 1))) // int(
        args.get("ep-size", args.get("expert-parallel-size", 1))
    )
    width = text_config(found).get("moe_intermediate_size")
    if isinstance(width, int) and ranks > 1 and width % (ranks * _BLOCK[0]):
        yield (
            f"generator.sglang.args.tp-size={args.get('tp-size')}: experts of {width} rows are no multiple of "
            f"{_BLOCK[0]} on each of {ranks} GPUs, as FP8 in blocks needs; set a smaller tp-size, or ep-size"
        )


def _is_fp8_block(kind: Any) -> bool:
    return isinstance(kind, dict) and kind.get("quant_method") == "fp8" and kind.get("weight_block_size") == _BLOCK


def _kind(kind: Any) -> str:
    if not isinstance(kind, dict):
        return "not quantised"
    block = kind.get("weight_block_size")
    return f"{kind.get('quant_method', 'of an unknown kind')}{f' in blocks of {block}' if block else ''}"
