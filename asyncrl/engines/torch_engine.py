"""The embedded engine: a transformers model, decoded by one background thread that owns it.

The thread runs `Batch.step` and, between steps, what callers sent it: requests, cancellations, loads.
Callers await futures of their own event loop, so any number of loops and threads may use one engine.
Knows no queue, no task and no weight carrier.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.engines.base import Source, Turn, check_request, check_turn
from asyncrl.engines.batch import Batch
from asyncrl.engines.choose import make_decoder
from asyncrl.engines.requests import Request
from asyncrl.engines.worker import Reply, Worker, in_thread
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.models.describe import describe
from asyncrl.models.finite import is_finite
from asyncrl.models.load import load_model
from asyncrl.models.names import Loader
from asyncrl.models.precision import RouterDtype, keep_float32, routers_in_float32
from asyncrl.models.routes import RouteHook
from asyncrl.types import Completion, ModelInfo, SamplingParams, Version


class TorchEngine:
    """Continuous batching of one model folder; see `asyncrl.engines.base.Engine`.

    version: label of the folder's weights. threads: torch threads of this process. max_rows: responses
    that run at a time, more wait. max_length: bound on prompt + response (default: what the model was
    made for, at most 4096); memory grows with what is used. seed: of the sampling. dtype and router_dtype as the
    learner computes (model.dtype, model.router_dtype). answer_s: longest time between two decode steps, loads and
    long prompts included; beyond, the engine hangs. Raises ConfigError for an unusable folder, EngineError when
    config and modules disagree about the routes.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        version: Version,
        dtype: str = "float32",
        threads: int = 1,
        max_rows: int = 256,
        max_length: int | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        attention: str = "sdpa",
        router_dtype: RouterDtype = "checkpoint",
        answer_s: float = 60.0,
    ) -> None:
        torch.set_num_threads(threads)
        self._threads, self._answer_s = threads, answer_s
        self._info = describe(model_path)
        # grouped_mm has no float64 kernel.
        experts = "eager" if dtype == "float64" else "grouped_mm"
        model = load_model(model_path, dtype, attention, experts, str(device)).requires_grad_(False)
        if dtype == "bfloat16":
            keep_float32(model, router_dtype)
            if router_dtype == "float32":
                routers_in_float32(model)
        hook = RouteHook(model) if self._info.is_moe else None
        _check_routes(self._info, hook)
        longest = int(getattr(model.config.get_text_config(), "max_position_embeddings", 4096))
        self._max_length = max_length or min(longest, 4096)
        self._loader = Loader(model)
        self._decoder = make_decoder(model, hook, max_rows)
        self._batch = Batch(self._decoder, self._info, version, max_rows, seed, model.device)
        self._busy_s = self._load_s = 0.0
        self._loads = 0
        self._worker = Worker("torch-engine", self._begin, lambda: self._batch.busy, self._step)

    @property
    def version(self) -> Version:
        """Version of the weights in use."""
        return self._batch.version

    def describe(self) -> ModelInfo:
        """MoE layers, experts, top-k, vocabulary and fingerprint."""
        return self._info

    def stats(self) -> dict[str, float]:
        """Counters since start; gauges `running` rows, `waiting` requests, kept `conversations`.

        busy_s is time in decode steps, reused_tokens those of prompts that a conversation had computed before.
        """
        batch = self._batch
        return {
            "tokens": float(batch.tokens),
            "prompt_tokens": float(batch.prompt_tokens),
            "busy_s": self._busy_s,
            "steps": float(batch.steps),
            "loads": float(self._loads),
            "load_s": self._load_s,
            "reused_tokens": float(batch.conversations.reused_tokens),
            "running": float(len(batch.running)),
            "conversations": float(len(batch.conversations)),
            "waiting": float(len(batch.waiting)),
        }

    async def generate(
        self,
        prompt_ids: NDArray[np.int32],
        n: int,
        sampling: SamplingParams,
        limit_s: float | None = None,
        cut: asyncio.Event | None = None,
        turn: Turn | None = None,
    ) -> list[Completion]:
        """n samples of one prompt. EngineError when refused or failed; cancelling the task frees its rows.

        After limit_s, or when cut is set, those that are finished, in order, perhaps none; the rows of the others are
        freed. EngineError when the decoding thread does not come to that.
        sampling.seed: the same seed and weights give the same samples, up to rounding, whatever else runs;
        None takes the engine's own stream.
        turn: at its end, keys, values and routes are kept for the next turn, which runs only the tokens that are new,
        unless weights were loaded in between or max_rows other conversations were used since. Of a turn that was cut
        the prompt is kept, of a cancelled one nothing.
        """
        check_request(prompt_ids, n, sampling, self._info.vocab_size, self._max_length)
        check_turn(prompt_ids, n, turn)
        reply = self._worker.reply()
        settle = self._worker.settle
        request = Request(
            np.asarray(prompt_ids), n, sampling, lambda ended: settle(reply, ended.completions, ended.error), turn
        )
        self._worker.send(lambda: self._batch.submit(request))
        try:
            if not await _ends(reply.future, limit_s, cut):
                self._worker.send(lambda: self._batch.cut(request))
                done, _ = await asyncio.wait([reply.future], timeout=self._answer_s)
                if not done:
                    raise EngineError(f"the engine hangs: no decode step ended within {self._answer_s:g} s")
            completions: list[Completion] = await reply.future
        except asyncio.CancelledError:
            # Nobody will ask for its end.
            reply.future.cancel()
            with contextlib.suppress(EngineError):  # the thread has ended, and its rows with it
                self._worker.send(lambda: self._batch.cancel(request))
            raise
        return completions

    def forget(self, conversation: str) -> None:
        """Free what is kept of a conversation."""
        with contextlib.suppress(EngineError):  # the thread has ended, and with it all that was kept
            self._worker.send(lambda: self._batch.forget(conversation))

    async def load(self, version: Version, source: Source) -> None:
        """Read and check in a worker thread, then copy between two decode steps; running responses go on.

        WeightSyncError (unreadable, not finite, other names or shapes, older than what is held) leaves the
        label and the weights as they were.
        """
        self._refuse_older(version)
        weights = await in_thread(lambda: _read(source))
        reply = self._worker.reply()
        self._worker.send(lambda: self._load_now(version, weights, reply))
        await reply.future

    def close(self) -> None:
        """Stop decoding; what still waits fails with EngineError. Waits for the running step, at most 2 s."""
        self._worker.close()

    # --- in the thread ----------------------------------------------------------------------------

    def _begin(self) -> None:
        # torch keeps this per thread.
        torch.set_num_threads(self._threads)

    def _step(self) -> None:
        started = time.perf_counter()
        self._batch.step()
        self._busy_s += time.perf_counter() - started

    def _load_now(self, version: Version, weights: Mapping[str, Tensor], reply: Reply) -> None:
        started = time.perf_counter()
        try:
            self._refuse_older(version)
            self._loader.load(weights)
        except WeightSyncError as exc:
            self._worker.settle(reply, None, exc)
            return
        self._decoder.refresh()
        self._batch.set_version(version)
        self._loads += 1
        self._load_s += time.perf_counter() - started
        self._worker.settle(reply, None)

    def _refuse_older(self, version: Version) -> None:
        if version < self._batch.version:
            raise WeightSyncError(f"version {version} is older than {self._batch.version}, which is held")


async def _ends(future: asyncio.Future[list[Completion]], limit_s: float | None, cut: asyncio.Event | None) -> bool:
    """Wait for the future, at most limit_s and until cut is set. True when it is done."""
    waits: list[asyncio.Future[Any]] = [future]
    if cut is not None:
        waits.append(asyncio.ensure_future(cut.wait()))
    try:
        done, _ = await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for extra in waits[1:]:
            extra.cancel()
    return future in done


def _read(source: Source) -> Mapping[str, Tensor]:
    try:
        weights = source.tensors()
    except OSError as exc:
        raise WeightSyncError(f"the weights cannot be read: {exc}") from exc
    bad = [name for name, tensor in weights.items() if not is_finite(tensor)]
    if bad:
        raise WeightSyncError(f"{len(bad)} tensors are not finite, first {bad[0]}")
    return weights


def _check_routes(info: ModelInfo, hook: RouteHook | None) -> None:
    """The folder's description is what the other side trusts: it must fit the modules."""
    if hook is None:
        return
    found = (hook.layers, hook.num_experts, hook.top_k)
    if found != (info.layers, info.num_experts, info.top_k):
        raise EngineError(
            f"config.json says MoE layers {info.layers}, E={info.num_experts}, K={info.top_k}; the modules have "
            f"{found[0]}, E={found[1]}, K={found[2]}"
        )
