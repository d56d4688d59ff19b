"""Decoders that run the transformers module itself: any family, slower than the flat decoder.

RecomputeDecoder runs every response from its first token at every step: right for any causal model.
CachedDecoder keeps keys and values by row; `cached_or_recompute` takes it where a trial gives the same logits.

Axes: A running rows, P new prompts, S their padded length, B rows of one forward, G kv heads, D head dim,
C positions, V vocabulary, L MoE layers, K experts per token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from asyncrl.engines.decoder import Decoder, Forward, Prompts, continued
from asyncrl.models.routes import RouteHook

log = logging.getLogger(__name__)


class RecomputeDecoder:
    """Keeps only the tokens of every row and runs them all at every step, right-padded."""

    def __init__(self, model: PreTrainedModel, hook: RouteHook | None, rows: int) -> None:
        self._model: Any = model
        self._hook = hook
        self._rows = rows
        self._tokens = torch.zeros(rows, 0, dtype=torch.int64, device=model.device)

    def refresh(self) -> None:
        """Nothing is derived from the weights."""

    def reserve(self, length: int) -> None:
        """Grow the token table."""
        grown = length - self._tokens.shape[1]
        if grown > 0:
            self._tokens = torch.cat((self._tokens, self._tokens.new_zeros(self._rows, grown)), dim=1)

    def forward(self, tokens_A: Tensor, positions_A: Tensor, length: int, prompts: Prompts | None) -> Forward:
        """The running rows, then the new prompts, each as one module forward."""
        rows, parts = len(tokens_A), []
        if rows:
            self._tokens[torch.arange(rows, device=tokens_A.device), positions_A] = tokens_A
            parts.append(self._step(tokens_A, positions_A, length))
        prompt_routes = None
        if prompts is not None:
            logits_PV, prompt_routes = self._prefill(prompts, rows)
            parts.append((logits_PV[prompts.source_N], None))
        logits_BV = torch.cat([logits for logits, _ in parts])
        return Forward(logits_BV, parts[0][1] if rows else self._no_routes(), prompt_routes)

    def _step(self, tokens_A: Tensor, positions_A: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
        logits_AV, routes_ASLK = self._run(self._tokens[: len(tokens_A), :length], positions_A)
        return logits_AV, None if routes_ASLK is None else _at(routes_ASLK, positions_A)

    def _prefill(self, prompts: Prompts, first: int) -> tuple[Tensor, Tensor | None]:
        padded = prompts.tokens_PS.shape[1]
        self._tokens[first : first + len(prompts.source_N), :padded] = prompts.tokens_PS[prompts.source_N]
        return self._run(prompts.tokens_PS, prompts.lengths_P - 1)

    def _run(self, tokens_BS: Tensor, last_B: Tensor, **extra: Any) -> tuple[Tensor, Tensor | None]:
        """Logits [B, V] at position last_B of right-padded rows, routes [B, S, L, K]."""
        mask_BS = torch.arange(tokens_BS.shape[1], device=last_B.device) <= last_B[:, None]
        keep, which = last_B.unique(return_inverse=True)
        call = {"attention_mask": mask_BS.long(), "logits_to_keep": keep, "use_cache": False, **extra}
        with nullcontext() if self._hook is None else self._hook.record():
            logits = self._model(input_ids=tokens_BS, **call).logits
        routes = None if self._hook is None else self._hook.native.permute(1, 2, 0, 3)
        return _at(logits, which), routes

    def _no_routes(self) -> Tensor | None:
        if self._hook is None:
            return None
        return self._tokens.new_zeros(0, len(self._hook.layers), self._hook.top_k)

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy tokens between rows."""
        self._tokens[target] = self._tokens[source]

    def save(self, row: int, length: int) -> Any | None:
        """None: a row that goes on is run from its first token all the same."""
        return None

    def restore(self, row: int, saved: Any) -> None:
        """Nothing was saved."""
        raise NotImplementedError("nothing was saved")

    def clear(self, first: int) -> None:
        """Token numbers are always finite."""


class CachedDecoder(RecomputeDecoder):
    """Keeps keys and values of every layer by row: families whose layers are all softmax attention.

    saves: false for a model that cannot go on from what was saved.
    """

    def __init__(self, model: PreTrainedModel, hook: RouteHook | None, rows: int) -> None:
        super().__init__(model, hook, rows)
        self.saves = True
        self._cache = _RowCache(rows)

    def reserve(self, length: int) -> None:
        """Grow tokens and cache."""
        super().reserve(length)
        self._cache.reserve(self._tokens.shape[1])

    def _step(self, tokens_A: Tensor, positions_A: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
        self._cache.begin_step(positions_A, length)
        positions_A1 = positions_A[:, None]
        call = {"attention_mask": self._masks(positions_A1, length), "position_ids": positions_A1}
        with nullcontext() if self._hook is None else self._hook.record():
            logits = self._model(input_ids=tokens_A[:, None], cache=self._cache, use_cache=True, **call).logits
        routes_ALK = None if self._hook is None else self._hook.native[:, :, 0].transpose(0, 1)
        return logits[:, -1], routes_ALK

    def _prefill(self, prompts: Prompts, first: int) -> tuple[Tensor, Tensor | None]:
        if prompts.starts_P is not None:
            return self._extend(prompts, first)
        self._cache.begin_prefill(first, prompts.source_N)
        return self._run(prompts.tokens_PS, prompts.lengths_P - 1, cache=self._cache, use_cache=True)

    def _extend(self, prompts: Prompts, first: int) -> tuple[Tensor, Tensor | None]:
        seen, positions_PS, real_PS = continued(prompts)
        self._cache.begin_extend(first, positions_PS, real_PS, seen)
        call = {"attention_mask": self._masks(positions_PS, seen), "position_ids": positions_PS}
        return self._run(prompts.tokens_PS, prompts.lengths_P - 1, cache=self._cache, **(call | {"use_cache": True}))

    def _masks(self, positions_AS: Tensor, length: int) -> Tensor | dict[str, Tensor]:
        """Additive masks [A, 1, S, C] of new tokens, by layer type where the family has sliding layers."""
        config = self._model.config.get_text_config()
        columns, wide = torch.arange(length, device=positions_AS.device), positions_AS[..., None]
        full = self._additive(columns <= wide)
        window = getattr(config, "sliding_window", None)
        if not window:
            return full
        sliding = self._additive((columns <= wide) & (columns > wide - window))
        types = set(getattr(config, "layer_types", None) or ())
        return {"full_attention": full, "sliding_attention": sliding} if types else sliding

    def _additive(self, seen: Tensor) -> Tensor:
        bias = torch.zeros(seen.shape, dtype=self._model.dtype, device=seen.device)
        return bias.masked_fill_(~seen, torch.finfo(bias.dtype).min)[:, None]

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy tokens and cached positions between rows."""
        super().move(source, target, length)
        self._cache.move(source, target, length)

    def save(self, row: int, length: int) -> list[list[Tensor]] | None:
        """Keys and values [G, length, D] of every layer."""
        return self._cache.save(row, length) if self.saves else None

    def restore(self, row: int, saved: list[list[Tensor]]) -> None:
        """Row begins with what was saved; its tokens before that are asked for by nobody."""
        self._cache.restore(row, saved)

    def clear(self, first: int) -> None:
        """Zero rows first and above."""
        self._cache.clear(first)


class _RowCache(Cache):
    """Keys and values [R, G, C, D] per layer, written at each row's own position. Shapes come with the first update."""

    def __init__(self, rows: int) -> None:
        super().__init__(layers=[])
        self._rows = rows
        self._capacity = 0
        self._real: Tensor | None = None
        self._states: dict[int, list[Tensor]] = {}
        self._source: Tensor | None = None

    def reserve(self, capacity: int) -> None:
        """Grow what there is; layers seen later start at this capacity."""
        self._capacity = capacity
        for states in self._states.values():
            for i, old in enumerate(states):
                states[i] = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
                states[i][:, :, : old.shape[2]] = old

    def begin_prefill(self, first: int, source_N: Tensor) -> None:
        """The next forward runs prompts from position 0; row first + i takes prompt source_N[i]."""
        self._first, self._source = first, source_N

    def begin_step(self, positions_A: Tensor, length: int) -> None:
        """The next forward feeds one token per row."""
        self._source, self._real, self._positions, self._length = None, None, positions_A, length

    def begin_extend(self, first: int, positions_PS: Tensor, real_PS: Tensor, length: int) -> None:
        """The next forward runs tokens after what rows first... hold; pads are not written."""
        self._source, self._real, self._length = None, real_PS, length
        self._rows_n, self._positions = first + real_PS.nonzero()[:, 0], positions_PS[real_PS]
        self._extended = slice(first, first + len(real_PS))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store the new states; give back what this forward attends to."""
        new = (key_states, value_states)
        if layer_idx not in self._states:
            self._states[layer_idx] = [
                part.new_zeros(self._rows, part.shape[1], self._capacity, part.shape[3]) for part in new
            ]
        states = self._states[layer_idx]
        if self._source is not None:
            rows = slice(self._first, self._first + len(self._source))
            for state, part in zip(states, new, strict=True):
                state[rows, :, : part.shape[2]] = part[self._source]
            return new
        if self._real is not None:
            for state, part in zip(states, new, strict=True):
                state[self._rows_n, :, self._positions] = part.transpose(1, 2)[self._real]
            return tuple(state[self._extended, :, : self._length] for state in states)
        numbers = torch.arange(len(self._positions), device=self._positions.device)
        for state, part in zip(states, new, strict=True):
            state[numbers, :, self._positions] = part[:, :, 0]
        return tuple(state[: len(numbers), :, : self._length] for state in states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are given with every call, so nothing is derived from the length."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Masks of a prefill cover the prompt; those of a step are given."""
        return query_length, 0

    def save(self, row: int, length: int) -> list[list[Tensor]]:
        """Copies of the first `length` positions, layer by layer."""
        return [[state[row, :, :length].clone() for state in self._states[i]] for i in sorted(self._states)]

    def restore(self, row: int, saved: list[list[Tensor]]) -> None:
        """Write what was saved to the beginning of a row."""
        for i, layer in zip(sorted(self._states), saved, strict=True):
            for state, part in zip(self._states[i], layer, strict=True):
                state[row, :, : part.shape[1]] = part

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` positions."""
        for states in self._states.values():
            for state in states:
                state[target, :, :length] = state[source, :, :length]

    def clear(self, first: int) -> None:
        """Zero rows first and above."""
        for states in self._states.values():
            for state in states:
                state[first:].zero_()


def _at(states_BS: Tensor, index_B: Tensor) -> Tensor:
    """states_BS[b, index_B[b]]."""
    return states_BS[torch.arange(len(index_B), device=index_B.device), index_B]


_ERRORS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What a module raises that does not fit a cache which is not its own."""


def cached_or_recompute(model: PreTrainedModel, hook: RouteHook | None, rows: int) -> Decoder:
    """A CachedDecoder if it agrees with a RecomputeDecoder on a trial, else the latter, with a warning."""
    ours, theirs = CachedDecoder(model, hook, 2), RecomputeDecoder(model, hook, 2)
    reason = _fault(lambda: _trial(model, ours, theirs), model)
    if reason:
        log.warning("model type %r decodes without a KV cache, slowly: %s", model.config.model_type, reason)
        return RecomputeDecoder(model, hook, rows)
    decoder = CachedDecoder(model, hook, rows)
    reason = _fault(lambda: _trial_of_saves(model, ours, theirs), model)
    if reason:
        decoder.saves = False
        log.warning(
            "model type %r computes every turn of a conversation from its first token: %s",
            model.config.model_type, reason,
        )  # fmt: skip
    return decoder


def _fault(trial: Callable[[], float], model: PreTrainedModel) -> str:
    """What is wrong with a trial; "" when nothing is."""
    try:
        difference = trial()
    except _ERRORS as exc:
        return f"{type(exc).__name__}: {exc}"
    # A wrong cache differs by the size of the logits, rounding by a few of its units.
    is_good = difference <= max(1e-4, 8 * torch.finfo(model.dtype).eps)
    return "" if is_good else f"its logits differ by {difference:.1e} of their size"


@torch.inference_mode()
def _trial(model: PreTrainedModel, first: Decoder, second: Decoder) -> float:
    """Largest difference of their logits over two ragged rows and a few steps, relative to the largest logit."""
    tokens, vocab_size = _trial_tokens(model)
    lengths = tokens.new_tensor([24, 5])
    prompts = Prompts(tokens, lengths, tokens.new_tensor([0, 1]))
    for decoder in (first, second):
        decoder.reserve(28)
    nobody, worst = lengths[:0], 0.0
    for step in range(4):
        positions = lengths - 1 + step
        now = (positions % vocab_size, positions, 24 + step, None) if step else (nobody, nobody, 0, prompts)
        ours, theirs = (decoder.forward(*now).logits_BV for decoder in (first, second))
        worst = max(worst, _difference(ours, theirs))
    return worst


@torch.inference_mode()
def _trial_of_saves(model: PreTrainedModel, first: Decoder, second: Decoder) -> float:
    """After `_trial`: as there, when two rows go on from other beginnings of the first prompt, which first saved."""
    tokens, _ = _trial_tokens(model)
    line, both = tokens[:1], tokens.new_tensor([0, 1])
    starts = (16, 20)
    for row, saved in enumerate([first.save(0, start) for start in starts]):
        first.restore(row, saved)
    ends = torch.cat((line[:, 16:], line[:, 20:].repeat(1, 2)))
    rest = Prompts(ends, tokens.new_tensor([8, 4]), both, tokens.new_tensor(starts))
    whole = Prompts(line, tokens.new_tensor([24]), tokens.new_tensor([0, 0]))
    ours, theirs = (d.forward(both[:0], both[:0], 0, p).logits_BV for d, p in ((first, rest), (second, whole)))
    return _difference(ours, theirs)


def _trial_tokens(model: PreTrainedModel) -> tuple[Tensor, int]:
    """Two prompts of 24 tokens, and a bound on them."""
    vocab_size = min(13, int(model.config.get_text_config().vocab_size))
    return (torch.arange(48, device=model.device) % vocab_size).view(2, 24), vocab_size


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
