"""State of the rows of the decode batch, as a few tensors that stay dense. Knows no model and no request.

Rows [0, A) run. A row that ends is replaced by the last running one, so every decode step works on slices.
Axes: A running rows, R rows at most, C positions, L MoE layers, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_RECORD, _TOKEN, _POSITION, _NEW, _LIMIT, _STOP_SET = range(6)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an emitted token did to its row: 1-D bool tensors over the rows it was emitted for."""

    stopped: Tensor
    full: Tensor
    broken: Tensor

    @property
    def ended(self) -> Tensor:
        """Rows that leave the batch."""
        return self.stopped | self.full | self.broken


class Rows:
    """Per running row: current token and its position, tokens so far, limit, temperature, stop set.

    `record` is where the row's output is written (class Records); it never moves, the row may.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.count = 0
        self._ints = torch.zeros(6, rows, dtype=torch.int64, device=device)
        self._temperature = torch.ones(rows, device=device)
        self._greedy = torch.zeros(rows, dtype=torch.bool, device=device)
        self._stop_sets: dict[tuple[int, ...], int] = {}
        self._stop_table = torch.zeros(0, 0, dtype=torch.bool, device=device)

    def stop_set(self, token_ids: tuple[int, ...], vocab_size: int) -> int:
        """Number of a set of stop tokens; the same set keeps its number."""
        key = tuple(sorted(set(token_ids)))
        if key not in self._stop_sets:
            line = torch.zeros(1, vocab_size, dtype=torch.bool, device=self._ints.device)
            line[0, list(key)] = True
            table = self._stop_table if self._stop_sets else line[:0]
            self._stop_sets[key] = len(self._stop_sets)
            self._stop_table = torch.cat((table, line))
        return self._stop_sets[key]

    def append(self, columns: list[list[int]], temperature: float, greedy: bool) -> None:
        """Add rows, each [record, prompt length, limit, stop set]; their first token is emitted next."""
        added = slice(self.count, self.count + len(columns))
        wanted = torch.tensor(columns, dtype=torch.int64, device=self._ints.device)
        self._ints[[_RECORD, _POSITION, _LIMIT, _STOP_SET], added] = wanted.t()
        self._ints[_POSITION, added] -= 1
        self._ints[_NEW, added] = 0
        self._temperature[added] = temperature
        self._greedy[added] = greedy
        self.count += len(columns)

    @property
    def tokens(self) -> Tensor:
        """Token to feed next, int64 [A]."""
        return self._ints[_TOKEN, : self.count]

    @property
    def positions(self) -> Tensor:
        """Position of that token, int64 [A]."""
        return self._ints[_POSITION, : self.count]

    @property
    def records(self) -> Tensor:
        """Record of each row, int64 [A]."""
        return self._ints[_RECORD, : self.count]

    @property
    def new_tokens(self) -> Tensor:
        """Response tokens so far, int64 [A]."""
        return self._ints[_NEW, : self.count]

    @property
    def temperature(self) -> Tensor:
        """Temperatures, float32 [A]."""
        return self._temperature[: self.count]

    @property
    def greedy(self) -> Tensor:
        """Which rows are greedy, bool [A]."""
        return self._greedy[: self.count]

    def emit(self, tokens: Tensor, logprobs: Tensor) -> Outcome:
        """The rows sampled these tokens [A]."""
        ints = self._ints[:, : self.count]
        ints[_TOKEN] = tokens
        ints[_POSITION : _NEW + 1].add_(1)
        stopped = self._stop_table.view(-1).index_select(0, ints[_STOP_SET] * self._stop_table.shape[1] + tokens)
        # The log-softmax of a row with a bad logit is NaN; a token of log-prob -inf is never chosen.
        return Outcome(stopped, ints[_NEW] >= ints[_LIMIT], torch.isnan(logprobs))

    def plan_removal(self, leaving: list[int]) -> tuple[list[int], list[int]]:
        """(source, target) rows of the moves that close the gaps of `leaving`; nothing moves yet."""
        gone = set(leaving)
        kept = self.count - len(gone)
        holes = sorted(row for row in gone if row < kept)
        movers = [row for row in range(kept, self.count) if row not in gone]
        return movers, holes

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the state of rows source to rows target."""
        for state in (self._ints, self._temperature, self._greedy):
            state[..., target] = state[..., source]


class Records:
    """Where the output of each running response is collected: tokens, log-probs and routes by record."""

    def __init__(self, rows: int, layers: int, top_k: int, wide_routes: bool, device: torch.device) -> None:
        self.capacity = 0
        self.free = list(range(rows - 1, -1, -1))
        self._rows = rows
        self._routes_of = layers * top_k
        self._shape = (layers, top_k)
        # torch has few uint16 operations: int16 holds the same bits and is viewed as uint16 when it leaves.
        self.route_dtype = torch.int16 if wide_routes else torch.uint8
        self._device = device
        self._tokens = torch.zeros(rows, 0, dtype=torch.int32, device=device)
        self._logprobs = torch.zeros(rows, 0, dtype=torch.float32, device=device)
        self._routes = torch.zeros(rows, 0, layers * top_k, dtype=self.route_dtype, device=device)

    def reserve(self, length: int) -> None:
        """Room for `length` response tokens per record."""
        extra = length - self.capacity
        if extra > 0:
            self._tokens, self._logprobs, self._routes = (
                torch.cat((old, old.new_zeros(self._rows, extra, *old.shape[2:])), dim=1)
                for old in (self._tokens, self._logprobs, self._routes)
            )
            self.capacity = length

    def put_tokens(self, records: Tensor, index: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        """Store token number `index` of each record."""
        at = records * self.capacity + index
        self._tokens.view(-1).index_copy_(0, at, tokens.int())
        self._logprobs.view(-1).index_copy_(0, at, logprobs.float())

    def put_routes(self, records: Tensor, index: Tensor, routes_ALK: Tensor) -> None:
        """Store the routes of the input position that holds response token `index`."""
        at = records * self.capacity + index
        rows = routes_ALK.to(self.route_dtype).reshape(len(at), self._routes_of)
        self._routes.view(-1, self._routes_of).index_copy_(0, at, rows)

    def read(self, records: list[int], length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Copies on the CPU of the first `length` tokens: [n, length], [n, length], [n, length, L, K]."""
        at = torch.tensor(records, device=self._device)
        routes = self._routes[at, :length].view(len(records), length, *self._shape)
        return self._tokens[at, :length].cpu(), self._logprobs[at, :length].cpu(), routes.cpu()
