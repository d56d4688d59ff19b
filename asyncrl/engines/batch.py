"""Continuous batching, one step at a time and without a thread: requests in, completions out.

Every `step` gives each running row exactly one token, and rows of newly admitted requests their first.
Weights may change between two steps; `set_version` marks where in each running response that happened.
Knows no event loop, no weight carrier and no model family.

Axes: A running rows, P new prompts, S their padded length, B rows with the new ones, V vocabulary, L MoE layers,
K experts per token.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.engines.conversations import Conversations, Routes
from asyncrl.engines.decoder import Decoder, Prompts
from asyncrl.engines.requests import Admitted, Request, Row
from asyncrl.engines.rows import Outcome, Records, Rows
from asyncrl.engines.sampler import draw, log_probs
from asyncrl.errors import EngineError
from asyncrl.types import Completion, ModelInfo, Version

_PREFILL_TOKENS = 8192
"""Padded tokens of one prefill, so that its activations stay small."""


class Batch:
    """The decode batch of one model: at most max_rows responses run, more requests wait in order."""

    def __init__(
        self, decoder: Decoder, info: ModelInfo, version: Version, max_rows: int, seed: int, device: torch.device
    ) -> None:
        self.version = version
        self.steps = 0
        self.tokens = 0
        self.prompt_tokens = 0
        self.waiting: deque[Request] = deque()
        self.running: list[Row] = []
        self.conversations = Conversations(decoder, max_rows)
        self._decoder = decoder
        self._info = info
        self._max_rows = max_rows
        self._device = device
        self._rows = Rows(max_rows, device)
        self._records = Records(max_rows, len(info.layers), info.top_k, info.route_dtype.itemsize > 1, device)
        self._greedy_rows = 0
        self._seeded_rows = 0
        self._generator = torch.Generator(device).manual_seed(seed)

    @property
    def busy(self) -> bool:
        """True while a step has something to do."""
        return bool(self.running or self.waiting)

    def submit(self, request: Request) -> None:
        """Queue a request that `check_request` accepted."""
        self.waiting.append(request)

    @torch.inference_mode()
    def cancel(self, request: Request, error: EngineError | None = None) -> None:
        """Free its rows, its place in the queue and its conversation; it ends with error (default: cancelled)."""
        if request.turn is not None and not request.ended:
            self.conversations.forget(request.turn.conversation)
            request.forgotten = True
        self._stop(request, error or EngineError("the request was cancelled"))

    @torch.inference_mode()
    def cut(self, request: Request) -> None:
        """Free its rows and its place in the queue; it ends well, with the samples that are finished.

        Of a conversation the prompt is kept.
        """
        for number, row in enumerate(self.running):
            # What older weights made of the prompt is in no segment of a turn that asks for it again.
            if row.request is request and not row.through_load:
                self._keep(number, row, request.prompt_ids, row.prompt_routes)
        self._stop(request, None)

    def forget(self, conversation: str) -> None:
        """Free what is kept of a conversation, and keep nothing of its turn that runs or waits."""
        self.conversations.forget(conversation)
        for request in (*self.waiting, *(row.request for row in self.running)):
            if request.conversation == conversation:
                request.forgotten = True

    def _stop(self, request: Request, error: EngineError | None) -> None:
        if request.ended:
            return
        self._drop([i for i, row in enumerate(self.running) if row.request is request])
        if request in self.waiting:
            self.waiting.remove(request)
        request.end(error)

    def set_version(self, version: Version) -> None:
        """Weights were loaded: tokens from now on carry `version`, running responses go on and get a new segment.

        What is kept of conversations is dropped, also when it is the same version again.
        """
        self.conversations.clear()
        for row in self.running:
            row.through_load = True
        if version == self.version:
            return
        self.version = version
        for row, new in zip(self.running, self._rows.new_tokens.tolist(), strict=True):
            row.mark(version, new)

    @torch.inference_mode()
    def step(self) -> None:
        """One token for every running row, and the first token of requests that fit beside them."""
        rows, chosen = self._rows, self._admissible()
        if not self.running and not chosen:
            return
        prompts, known = self._prompts(chosen) if chosen else (None, [])
        length = int(rows.positions.max()) + 1 if self.running else 0
        result = self._decoder.forward(rows.tokens, rows.positions, length, prompts)
        if result.routes_ALK is not None:
            self._records.put_routes(rows.records, rows.new_tokens - 1, result.routes_ALK)
        self._add(chosen, known, result.prompt_routes_PSLK)
        self.steps += 1
        self._emit(result.logits_BV)

    def _admissible(self) -> list[Admitted]:
        """The requests at the head of the queue that fit now: only new prompts, or only conversations that go on."""
        chosen: list[Admitted] = []
        free, longest = self._max_rows - len(self.running), 0
        for request in self.waiting:
            samples = min(request.n - request.started, self._max_rows)
            if samples > free:
                break
            name, prompt = request.conversation, request.prompt_ids
            # Of two turns of one name at once, the second finds nothing.
            is_next = name is not None and all(name != a.request.conversation for a in chosen)
            start = self.conversations.start_of(name, prompt) if name is not None and is_next else 0
            longest = max(longest, len(prompt) - start)
            if chosen and (bool(start) != bool(chosen[0].start) or (len(chosen) + 1) * longest > _PREFILL_TOKENS):
                break
            chosen.append(Admitted(request, samples, start))
            free -= samples
        return chosen

    def _prompts(self, chosen: list[Admitted]) -> tuple[Prompts, list[Routes | None]]:
        """What is to be run of the prompts of the chosen requests, each once, with room for their samples.

        Also the known routes of what is not.
        """
        ids = [request.prompt_ids[start:] for request, _, start in chosen]
        lengths = [len(prompt) for prompt in ids]
        padded = np.zeros((len(ids), max(lengths)), dtype=np.int64)
        for line, prompt in zip(padded, ids, strict=True):
            line[: len(prompt)] = prompt
        self._decoder.reserve(max(len(a.request.prompt_ids) + a.request.sampling.max_new_tokens for a in chosen))
        self._records.reserve(max(a.request.sampling.max_new_tokens for a in chosen))
        self.prompt_tokens += sum(lengths)
        known = [self._take(len(self.running) + i, admitted) for i, admitted in enumerate(chosen)]
        source = [i for i, admitted in enumerate(chosen) for _ in range(admitted.samples)]
        starts = self._tensor([start for *_, start in chosen]) if chosen[0].start else None
        return Prompts(self._tensor(padded), self._tensor(lengths), self._tensor(source), starts), known

    def _take(self, row: int, admitted: Admitted) -> Routes | None:
        """Put what is kept of a conversation into the row that it gets; its routes."""
        name = admitted.request.conversation
        return None if name is None or not admitted.start else self.conversations.take(name, row, admitted.start)

    def _add(self, chosen: list[Admitted], known: list[Routes | None], routes_PSLK: Tensor | None) -> None:
        routes = None if routes_PSLK is None else self._to_numpy(routes_PSLK)
        for i, (request, samples, start) in enumerate(chosen):
            own = None if routes is None else routes[i, : len(request.prompt_ids) - start]
            before = known[i]
            if own is not None and before is not None:
                own = np.concatenate((before, own))
            self._add_rows(request, samples, own)

    def _add_rows(self, request: Request, samples: int, routes: Routes | None) -> None:
        sampling, numbers = request.sampling, range(request.started, request.started + samples)
        stop = self._rows.stop_set(sampling.stop_token_ids, self._info.vocab_size)
        fixed = [len(request.prompt_ids), sampling.max_new_tokens, stop]
        columns = [[self._records.free.pop(), *fixed] for _ in numbers]
        self._rows.append(columns, sampling.temperature, sampling.greedy)
        for number in numbers:
            generator = None
            if sampling.seed is not None:
                generator = torch.Generator(self._device).manual_seed(sampling.seed + number)
            self.running.append(Row(request, number, routes, [(self.version, 0)], generator))
        self._count(request, samples)
        request.started += samples
        if request.started == request.n:
            self.waiting.remove(request)

    def _emit(self, logits_BV: Tensor) -> None:
        """Sample one token for every row, store it, and let finished rows go."""
        rows = self._rows
        logp_BV = log_probs(logits_BV, rows.temperature)
        tokens_B = self._choose(logp_BV)
        logp_B = logp_BV.gather(1, tokens_B[:, None])[:, 0]
        self._records.put_tokens(rows.records, rows.new_tokens, tokens_B, logp_B)
        outcome = rows.emit(tokens_B, logp_B)
        self.tokens += len(tokens_B)
        ended_B = outcome.ended
        if bool(ended_B.any()):
            self._finish(ended_B.nonzero()[:, 0].tolist(), outcome)

    def _choose(self, logp_BV: Tensor) -> Tensor:
        if self._greedy_rows == len(self.running):
            return logp_BV.argmax(dim=-1)
        uniform_B = torch.rand(len(logp_BV), dtype=torch.float64, device=self._device, generator=self._generator)
        for i, row in enumerate(self.running if self._seeded_rows else ()):
            if row.generator is not None:
                uniform_B[i] = torch.rand((), dtype=torch.float64, device=self._device, generator=row.generator)
        sampled_B = draw(logp_BV, uniform_B)
        return torch.where(self._rows.greedy, logp_BV.argmax(dim=-1), sampled_B) if self._greedy_rows else sampled_B

    def _finish(self, at: list[int], outcome: Outcome) -> None:
        """These rows are over: store their completions, end requests that are whole or broken."""
        stopped, broken = outcome.stopped.tolist(), outcome.broken.tolist()
        leaving = [self.running[number] for number in at]
        lengths = self._rows.new_tokens[at].tolist()
        tokens, logprobs, routes = self._records.read(self._rows.records[at].tolist(), max(lengths))
        tokens_np, logprobs_np, routes_np = tokens.numpy(), logprobs.numpy(), self._to_numpy(routes)
        for i, (row, length) in enumerate(zip(leaving, lengths, strict=True)):
            rows = row.prompt_routes
            if rows is not None:
                # The last token was never fed: S - 1 rows.
                rows = np.concatenate((rows, routes_np[i, : length - 1]))
            self._keep(at[i], row, np.concatenate((row.request.prompt_ids, tokens_np[i, : length - 1])), rows)
            row.request.by_sample[row.sample] = Completion(
                tokens_np[i, :length],
                logprobs_np[i, :length],
                row.segments(length),
                "stop" if stopped[at[i]] else "length",
                rows if rows is None or row.request.turn is None else rows[row.request.turn.rows :],
            )
        self._drop(at)
        failed = [row.request for i, row in enumerate(leaving) if broken[at[i]]]
        for request in failed:
            self.cancel(request, EngineError(f"log-probs of version {self.version} are not finite: check the weights"))
        if failed:
            self._decoder.clear(len(self.running))
        for row in leaving:
            if row.request.complete:
                row.request.end(None)

    def _keep(self, number: int, row: Row, token_ids: NDArray[np.int32], routes: Routes | None) -> None:
        """Keep these tokens of a row, if it is a turn whose conversation may go on."""
        if row.request.conversation is not None:
            self.conversations.keep(row.request.conversation, number, token_ids, routes)

    def _drop(self, leaving: list[int]) -> None:
        """Free rows and close the gaps with the last running ones."""
        if not leaving:
            return
        rows = self._rows
        self._records.free.extend(rows.records[leaving].tolist())
        for number in leaving:
            self._count(self.running[number].request, -1)
        movers, holes = rows.plan_removal(leaving)
        if movers:
            source, target = self._tensor(movers), self._tensor(holes)
            self._decoder.move(source, target, int(rows.positions[source].max()))
            rows.move(source, target)
            for mover, hole in zip(movers, holes, strict=True):
                self.running[hole] = self.running[mover]
        rows.count -= len(leaving)
        del self.running[rows.count :]

    def _count(self, request: Request, rows: int) -> None:
        request.running += rows
        self._greedy_rows += rows * request.sampling.greedy
        self._seeded_rows += rows * (request.sampling.seed is not None)

    def _tensor(self, values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self._device)

    def _to_numpy(self, routes: Tensor) -> NDArray[np.unsignedinteger]:
        array: NDArray[Any] = routes.to(self._records.route_dtype).cpu().numpy()
        return array.view(self._info.route_dtype)
