"""The engine behind a generator: the embedded one, or an SGLang server that runs already or is started here.

What it gives has passed the start-up probe. Knows the config and how the parts fit; no queue and no task.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import xxhash

from asyncrl.config import Config
from asyncrl.engines.base import Engine
from asyncrl.engines.gate import Gate
from asyncrl.engines.probe import probe
from asyncrl.engines.sglang import bodies, command
from asyncrl.engines.sglang.checks import check_temperature, check_vocabulary
from asyncrl.engines.sglang.client import Client
from asyncrl.engines.sglang.expects import needs
from asyncrl.engines.sglang.flags import Facts, check
from asyncrl.engines.sglang.key_files import read_key
from asyncrl.engines.sglang.served import Served
from asyncrl.engines.sglang.server import Launch, Server, wait_ready
from asyncrl.engines.sglang.update import Updater
from asyncrl.engines.sglang_engine import SglangEngine
from asyncrl.engines.torch_engine import TorchEngine
from asyncrl.generator.leave import LEAVE_S
from asyncrl.models.describe import max_length, read_config, text_config
from asyncrl.models.device import pick_device
from asyncrl.models.summary import shared_experts
from asyncrl.transport.address import is_loopback, parse
from asyncrl.types import ModelInfo, SamplingParams, Version

log = logging.getLogger(__name__)

LOCAL_INDEX = "ASYNCRL_LOCAL_INDEX"
"""Environment: how many generators before this one are on the same host; launchers of fleets set it."""
_CLOSE_S = 2.0
"""What else of run.shutdown_s a generator needs beside leave.LEAVE_S and its server's end."""
_LONGEST_GRACE_S = 30.0


@contextlib.asynccontextmanager
async def open_engine(
    config: Config, run_dir: Path, generator_id: str, info: ModelInfo, sampling: SamplingParams
) -> AsyncIterator[Engine]:
    """The engine of one generator, probed, behind a gate where weights.on_load asks for one; closed at the end.

    info: of the model that it serves. sampling: as the run samples. Use it in the main thread. ConfigError and
    EngineError name what cannot be used; nothing that was started here is left then.
    """
    async with contextlib.AsyncExitStack() as stack:
        engine: Engine
        if config.generator.engine == "torch":
            engine = _torch(config, generator_id)
            stack.callback(engine.close)
            await probe(engine, sampling)
        else:
            engine = await _sglang(config, run_dir, generator_id, info, sampling, stack)
        yield engine if config.weights.on_load == "keep" else Gate(engine, config.weights.on_load)


def hash_seed(seed: int, generator_id: str) -> int:
    """Different generators sample differently; the same one repeats."""
    return int(xxhash.xxh3_64_intdigest(f"{seed}|{generator_id}".encode()) % 2**31)


def _torch(config: Config, generator_id: str) -> TorchEngine:
    return TorchEngine(
        config.generator.model or config.model.path, version=Version(0, -1), threads=config.generator.threads,
        max_rows=config.generator.groups_in_flight * config.algorithm.group_size,
        dtype=_dtype(config), router_dtype=config.model.router_dtype,
        device=pick_device(config.generator.device, "generator.device"),
        seed=hash_seed(config.run.seed, generator_id),
    )  # fmt: skip


def _dtype(config: Config) -> str:
    # float64 is for checks of the learner: sampling in it would only be slow.
    return "bfloat16" if config.model.dtype == "bfloat16" else "float32"


# --- SGLang ---------------------------------------------------------------------------------------


async def _sglang(
    config: Config, run_dir: Path, generator_id: str, info: ModelInfo, sampling: SamplingParams,
    stack: contextlib.AsyncExitStack,
) -> Engine:  # fmt: skip
    """An engine on a server; what it needs is closed with stack. It waits for the server to load its model."""
    s = config.generator.sglang
    key = None if s.key_file is None else read_key(s.key_file, "generator.sglang.key_file")
    admin = None if s.admin_key_file is None else read_key(s.admin_key_file, "generator.sglang.admin_key_file")
    server: Server | None = None
    alive: Callable[[], None] = _runs
    if s.urls:
        url = command.url_of(s.urls, generator_id, config.generator.count).rstrip("/")
        await wait_ready(url, s.start_timeout_s, alive, generator_id)
    else:
        keys = {flag: value for flag, value in (("api-key", key), ("admin-api-key", admin)) if value is not None}
        server = Server(_launch(config, run_dir, generator_id, info, keys))
        stack.push_async_callback(server.stop)
        await server.start()
        url, alive = server.url, server.check
    client = Client(url, key, admin, s.answer_s)
    stack.push_async_callback(client.close)  # what this loop opened; the engine has a loop of its own
    facts = await _checked(config, client, info)
    engine = await _on(config, client, generator_id, info, facts)
    stack.callback(engine.close)
    if server is not None:
        stack.push_async_callback(_cancelled, asyncio.create_task(_watch(server, engine)))

    async def prove() -> bool:
        """The start-up checks. False when all tokens are equally likely, so that one of them says nothing."""
        await check_vocabulary(client, info.vocab_size)
        tells = await check_temperature(client, sampling.temperature)
        await probe(engine, sampling)
        return tells

    if engine.torn:
        log.warning("the server at %s is in the middle of an update; it is probed after the next one", url)
        return Served(engine, alive, prove)
    # A tied checkpoint is such a case: SGLang's qwen3_moe has its output matrix only after the first load.
    return Served(engine, alive, None if await prove() else prove)


def _launch(config: Config, run_dir: Path, generator_id: str, info: ModelInfo, keys: dict[str, str]) -> Launch:
    """How this generator's server is started."""
    s, model = config.generator.sglang, Path(config.generator.model or config.model.path)
    index = _local_index(generator_id, bool(s.port or s.gpus))
    quantised = bool(read_config(model).get("quantization_config"))
    args: dict[str, str | int | float | bool] = {}
    if config.weights.on_load == "keep":
        # With a step on its way when the server pauses, one token per response is of unsure weights, and its keys and
        # values may be, too. Whoever wants the speed back sets it to false.
        args["disable-overlap-schedule"] = True
    if _shared_experts(model):
        # Fused among the routed ones their weights could not be compared after an update.
        args["disable-shared-experts-fusion"] = True
    args |= {name.replace("_", "-"): value for name, value in s.args.items()}
    flags = command.flags(
        str(model.absolute()), dtype=None if quantised else _dtype(config),
        seed=hash_seed(config.run.seed, generator_id), return_routes=info.is_moe, args=args,
    )  # fmt: skip
    gpus = command.visible_gpus(s.gpus, s.first_gpu, index, os.environ.get("CUDA_VISIBLE_DEVICES"))
    loopback = config.weights.carrier == "disk" or is_loopback(parse(config.weights.bind).host)
    return Launch(
        name=generator_id,
        command=[*command.program(s.command), *flags],
        env=command.environment(os.environ, s.env, loopback=loopback, gpus=gpus),
        log=run_dir / "logs" / f"sglang-{generator_id}.log",
        port=s.port + index if s.port else 0,
        keys=keys,
        start_timeout_s=s.start_timeout_s,
        grace_s=min(_LONGEST_GRACE_S, max(1.0, config.run.shutdown_s - LEAVE_S - _CLOSE_S)),
    )


def _local_index(generator_id: str, matters: bool) -> int:
    """Number of this generator on its host. matters: whether a wrong one gives two servers the same port or GPU."""
    given = os.environ.get(LOCAL_INDEX, "")
    if given.isdigit():
        return int(given)
    number = command.number_of(generator_id)
    if number is None and matters:
        log.warning(
            "generator id %r has no number, so its server gets the first port and GPUs of this host; give each "
            "generator on a host an id of its own from g0 on, or set %s", generator_id, LOCAL_INDEX,
        )  # fmt: skip
    return number or 0


async def _checked(config: Config, client: Client, info: ModelInfo) -> Facts:
    """What the server says of itself. EngineError when it cannot be used as it was started."""
    model = Path(config.generator.model or config.model.path)
    own = read_config(model)
    facts = check(
        await client.get(bodies.SERVER_INFO), await client.get(bodies.MODEL_INFO), info,
        routes=info.is_moe, carrier=config.weights.carrier, num_hidden_layers=_num_layers(own),
        architectures=own.get("architectures") or (), shared_experts=_shared_experts(model),
        quantize=config.weights.quantize,
    )  # fmt: skip
    wanted = config.generator.groups_in_flight * config.algorithm.group_size
    if 0 < facts.max_running_requests < wanted:
        log.warning(
            "the server runs at most %d requests at a time and gets up to %d (generator.groups_in_flight x "
            "algorithm.group_size); the others wait in it: set generator.sglang.args.max-running-requests=%d or lower "
            "generator.groups_in_flight", facts.max_running_requests, wanted, wanted,
        )  # fmt: skip
    return facts


async def _on(config: Config, client: Client, generator_id: str, info: ModelInfo, facts: Facts) -> SglangEngine:
    model, w = Path(config.generator.model or config.model.path), config.weights
    updater = Updater(
        client, generator_id, facts.ranks, w.timeout_s, w.verify == "checksum", needs(model, _served_as(facts, model))
    )
    return await SglangEngine.open(
        client, info, num_hidden_layers=facts.num_hidden_layers, label=facts.label,
        max_length=min(facts.max_length, max_length(config.model.path, at_most=None)), name=generator_id,
        updater=updater, answer_s=config.generator.sglang.answer_s, overlap=facts.overlap,
    )  # fmt: skip


def _runs() -> None:
    """Nothing is known of the process behind a url."""


async def _watch(server: Server, engine: SglangEngine) -> None:
    """When the server's process ends, so does all that waits for it."""
    engine.fail(str(await server.watch()))


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _num_layers(config: dict[str, Any]) -> int:
    return int(text_config(config).get("num_hidden_layers") or 0)


def _shared_experts(model: Path) -> int:
    """How many experts of a layer every token goes through."""
    return shared_experts(text_config(read_config(model)))


def _served_as(facts: Facts, model: Path) -> str:
    """The dtype in which the server holds the floats of the model."""
    if facts.dtype in ("float32", "bfloat16", "float16"):
        return facts.dtype
    # auto: as stored, but never float32.
    text = text_config(read_config(model))
    stored = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return "float16" if stored == "float32" else stored
