"""Ask a running SGLang server for everything that asyncrl needs of it, and say what is missing or wrong.

    python tools/sglang_contract.py URL [--model DIR] [--api-key-file F] [--admin-key-file F] [--updates]

One line per check: ok, MISSING or WRONG with the remedy, skipped with the reason. Ends with status 1 when anything is
missing or wrong. The server stays as it is: it samples some tokens, is paused for a second, and with --updates gets
the weights of --model, if these are the ones that it has, under another label and then under its own again. Other
clients should not use it meanwhile. --updates needs a machine that the server reaches: --host is its address.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sglang_contract_lib.asking import Asker
from sglang_contract_lib.report import MISSING, OK, SKIPPED, WRONG, Report
from sglang_contract_lib.requests import check_requests
from sglang_contract_lib.updates import How, check_updates, check_weights

from asyncrl.engines.sglang import bodies
from asyncrl.engines.sglang.client import Client
from asyncrl.engines.sglang.flags import Facts, check, faults
from asyncrl.engines.sglang.key_files import read_key
from asyncrl.engines.sglang.routes import RouteDecoder
from asyncrl.errors import ConfigError
from asyncrl.models.describe import describe, read_config, text_config
from asyncrl.models.summary import shared_experts
from asyncrl.types import ModelInfo

DENSE = ModelInfo((), 0, 0, 0)
"""What is known of a model whose folder is not at hand."""


async def run(options: argparse.Namespace, report: Report) -> None:
    """All checks of the server at options.url. ConfigError for an unusable option."""
    key = options.api_key_file and read_key(options.api_key_file, "--api-key-file")
    admin = options.admin_key_file and read_key(options.admin_key_file, "--admin-key-file")
    client = Client(options.url, key, admin, options.answer_s)
    stranger = Client(options.url, answer_s=options.answer_s)
    try:
        with report.check("server"):
            server_info, model_info = await client.get(bodies.SERVER_INFO), await client.get(bodies.MODEL_INFO)
            await _checked(options, report, client, stranger, server_info, model_info, bool(key or admin))
    finally:
        await client.close()
        await stranger.close()


async def _checked(
    options: argparse.Namespace,
    report: Report,
    client: Client,
    stranger: Client,
    server_info: dict[str, Any],
    model_info: dict[str, Any],
    has_keys: bool,
) -> None:
    report.add(OK, "server", f"{client.url} serves {model_info.get('model_path')}")
    folder = _folder(options.model, model_info)
    info, facts = _flags(report, server_info, model_info, folder)
    if folder is None or facts is None:
        why = "the flags above come first" if folder is not None else "give --model DIR, the folder that it serves"
        report.add(SKIPPED, "everything else", why)
        return
    decoder = RouteDecoder(info, facts.num_hidden_layers) if info.is_moe else None
    asker = Asker(client, info, decoder, facts.label)
    await check_requests(report, asker, facts, stranger, has_keys)
    with report.check("weights"):
        dtype = _dtype(facts, folder)
        same = await check_weights(report, client, facts, folder, dtype, options.updates)
        if not options.updates:
            report.add(SKIPPED, "update", "give --updates")
        elif not same:
            report.add(SKIPPED, "update", "only weights that the server has are sent")
        else:
            with report.check("update"):
                await check_updates(report, asker, facts, folder, dtype, _how(options, facts))


def _folder(given: Path | None, model_info: dict[str, Any]) -> Path | None:
    """--model, or the server's own folder where this machine has it."""
    own = Path(str(model_info.get("model_path", "")))
    return given or (own if own.is_absolute() and (own / "config.json").is_file() else None)


def _flags(
    report: Report, server_info: dict[str, Any], model_info: dict[str, Any], folder: Path | None
) -> tuple[ModelInfo, Facts | None]:
    """The model and what the server is, None when its flags do not fit."""
    info, more = DENSE, dict[str, Any]()
    if folder is not None:
        own = read_config(folder)
        info = describe(folder)
        more = {"architectures": own.get("architectures") or (), "shared_experts": shared_experts(text_config(own))}
        more["quantize"] = "fp8_block" if own.get("quantization_config") else "none"
    found = list(faults(server_info, model_info, info, routes=info.is_moe, carrier="collective", **more))
    for fault in found:
        report.add(MISSING if fault.found == "missing" else WRONG, "flags", str(fault))
    if found:
        return info, None
    report.add(OK, "flags", f"version {server_info.get('version')}, {server_info.get('tp_size')} ranks")
    layers = int(text_config(read_config(folder))["num_hidden_layers"]) if folder is not None else 0
    more |= {"routes": info.is_moe, "carrier": "collective", "num_hidden_layers": layers}
    return info, check(server_info, model_info, info, **more)


def _dtype(facts: Facts, folder: Path) -> str:
    """In which the server holds the model's floats: auto is as stored, but never float32."""
    if facts.dtype in ("float32", "bfloat16", "float16"):
        return facts.dtype
    text = text_config(read_config(folder))
    stored = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return "float16" if stored == "float32" else stored


def _how(options: argparse.Namespace, facts: Facts) -> How:
    backend = options.backend
    if backend == "auto":
        backend = "nccl" if facts.device == "cuda" and torch.cuda.is_available() else "gloo"
    return How(options.host, backend, options.timeout_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a server and print it. Returns 0 when nothing is missing or wrong, 2 for unusable options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="http://HOST:PORT")
    parser.add_argument("--model", type=Path, help="model folder that it serves; default: its own, if it is here")
    parser.add_argument("--api-key-file", help="file with the server's API key")
    parser.add_argument("--admin-key-file", help="file with its admin key; default: the API key")
    parser.add_argument("--updates", action="store_true", help="also send it the weights that it has")
    parser.add_argument("--host", default="127.0.0.1", help="with --updates: this machine as the server reaches it")
    parser.add_argument("--backend", default="auto", choices=("auto", "gloo", "nccl"), help="with --updates")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="with --updates: longest phase")
    parser.add_argument("--answer-s", type=float, default=60.0, help="longest wait for an answer without sampling")
    options, report = parser.parse_args(arguments), Report()
    try:
        asyncio.run(run(options, report))
    except ConfigError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    return report.status


if __name__ == "__main__":
    sys.exit(main())
