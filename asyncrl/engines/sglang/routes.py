"""The routes of an SGLang reply -> what the rest of the package calls routes, once and checked. Knows no HTTP.

SGLang gives `routed_experts` as base64 of little-endian int32 without a header: one row for each token that it ran,
from routed_experts_start_len on, with a plane for every decoder layer and K columns. Builds differ in all three, so
what came decides, and it is refused unless there is exactly one way to read it.

Axes: S tokens of prompt and response, L MoE layers, E experts, K experts chosen per token.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from asyncrl.errors import RouteError
from asyncrl.types import ModelInfo

_WIRE = np.dtype("<i4")
_GOOD, _NEGATIVE, _PHYSICAL, _TWICE, _NOT_SHARED = range(5)

_FAULTS = {
    _NEGATIVE: "is no expert: the engine captured nothing there (-1 is padding)",
    _PHYSICAL: (
        "is outside [0, {experts}): ids of physical slots, not of experts; start the server without --enable-eplb and "
        "--ep-num-redundant-experts"
    ),
    _TWICE: "stands there twice: the engine's capture is broken (zeros, or another request's buffer)",
    _NOT_SHARED: "stands in a column beyond the {top_k} of the model, where only fused shared experts may be",
}


@njit(cache=True, nogil=True)
def _cast(ids, planes, experts, out):  # type: ignore[no-untyped-def]
    """Planes and first K columns of ids [rows, planes, width] to out [rows, L, K]; gives the first fault, its place."""
    seen = np.full(experts, -1, np.int64)
    stamp = 0
    for row in range(out.shape[0]):
        for layer in range(out.shape[1]):
            for column in range(ids.shape[2]):
                expert = ids[row, planes[layer], column]
                if column >= out.shape[2]:
                    if 0 <= expert < experts:
                        return _NOT_SHARED, row, layer, expert
                    continue
                if expert < 0:
                    return _NEGATIVE, row, layer, expert
                if expert >= experts:
                    return _PHYSICAL, row, layer, expert
                if seen[expert] == stamp:
                    return _TWICE, row, layer, expert
                seen[expert] = stamp
                out[row, layer, column] = expert
            stamp += 1
    return _GOOD, 0, 0, 0


class _Layout(NamedTuple):
    """planes and width of a row; width - K columns are of fused shared experts."""

    planes: int
    width: int


class RouteDecoder:
    """Decodes the routes of one server, whose layout the first reply settles; another one is then refused.

    num_hidden_layers counts all decoder layers, dense ones too. Raises RouteError for a model whose MoE layers are not
    among them, or that has none.
    """

    def __init__(self, info: ModelInfo, num_hidden_layers: int) -> None:
        if not info.is_moe or max(info.layers) >= num_hidden_layers:
            raise RouteError(f"MoE layers {list(info.layers)} of {num_hidden_layers} layers: nothing to decode")
        self.info = info
        self.num_hidden_layers = num_hidden_layers
        self._layout: _Layout | None = None

    def decode(self, blob: Any, num_tokens: int, start_len: int = 0, *, request: str) -> NDArray[np.unsignedinteger]:
        """Routes [S - 1 - start_len, L, K] in the model's route dtype, of the rows from start_len on.

        blob: routed_experts of the reply (None: there was none). num_tokens: S of this request, start_len its
        routed_experts_start_len: 0, or for a turn of a conversation S - 1 of the turns before. A server that ignored
        it sends all S - 1 rows; the first ones are then left out, since the caller has them from when their tokens
        were sampled, and they may have been computed again since. request names it in every RouteError: no routes, no
        base64, rows or planes or columns of another number, ids that are no experts, an expert twice in a row.
        """
        if num_tokens < 1 or not 0 <= start_len < num_tokens:
            raise RouteError(f"{request}: there are no routes of {num_tokens} tokens from row {start_len} on")
        last, wanted = num_tokens - 1, num_tokens - 1 - start_len
        ids = self._ids(blob, wanted, request)
        if not wanted and not len(ids):
            return self._empty(0)
        read = [(layout, *self._read(ids, rows, layout)) for rows, layout in self._shapes(len(ids), wanted, last)]
        if not read:
            raise RouteError(f"{request}: {self._misfit(len(ids), wanted, last)}")
        good = [(layout, routes) for layout, routes, fault, _ in read if not fault]
        if not good:
            # The reading that came furthest is the likeliest.
            raise RouteError(f"{request}: {max(read, key=lambda r: r[3])[2]}")
        if len(good) > 1:
            shapes = " and as ".join(f"{len(routes)} rows of {_words(layout)}" for layout, routes in good)
            raise RouteError(f"{request}: {len(ids)} ids read as {shapes}; a server's first reply must leave no doubt")
        self._layout, routes = good[0]
        return routes[len(routes) - wanted :]

    def _ids(self, blob: Any, wanted: int, request: str) -> NDArray[np.int32]:
        """The numbers of a reply, flat."""
        if blob is not None and not isinstance(blob, str):
            raise RouteError(f"{request}: routed_experts is {type(blob).__name__}, expected base64 text")
        if not blob and wanted:
            raise RouteError(
                f"{request}: routes lost: expected {wanted} rows, received none; the server needs "
                "--enable-return-routed-experts, and the request return_routed_experts"
            )
        try:
            raw = base64.b64decode(blob or "", validate=True)
        except ValueError as exc:
            raise RouteError(f"{request}: routed_experts is no base64: {exc}") from exc
        if len(raw) % _WIRE.itemsize:
            raise RouteError(f"{request}: routed_experts has {len(raw)} bytes, which are no int32 numbers")
        return np.frombuffer(raw, _WIRE)

    def _shapes(self, size: int, wanted: int, last: int) -> Iterator[tuple[int, _Layout]]:
        """Every (rows, layout) that `size` ids can have: the rows asked for or all, every plane or the MoE layers'."""
        for planes in dict.fromkeys((self.num_hidden_layers, len(self.info.layers))):
            for rows in dict.fromkeys((wanted, last)):
                width, rest = divmod(size, rows * planes) if rows else (0, 0)
                layout = _Layout(planes, width)
                if not rest and width >= self.info.top_k and self._layout in (None, layout):
                    yield rows, layout

    def _read(self, ids: NDArray[np.int32], rows: int, layout: _Layout) -> tuple[NDArray[np.unsignedinteger], str, int]:
        """Routes [rows, L, K], the first fault in them ("" when there is none) and its row."""
        info = self.info
        # By layer number. What stands in the planes of dense layers is never looked at.
        planes = info.layers if layout.planes == self.num_hidden_layers else range(len(info.layers))
        out = self._empty(rows)
        fault, row, layer, expert = _cast(ids.reshape(rows, *layout), np.asarray(planes), info.num_experts, out)
        if fault == _GOOD:
            return out, "", rows
        what = _FAULTS[fault].format(experts=info.num_experts, top_k=info.top_k)
        return out, f"row {row} of {rows}, layer {info.layers[layer]}: expert id {expert} {what}", row

    def _misfit(self, size: int, wanted: int, last: int) -> str:
        every, moe, top_k = self.num_hidden_layers, len(self.info.layers), self.info.top_k
        layouts = [self._layout] if self._layout else [_Layout(n, top_k) for n in dict.fromkeys((every, moe))]
        rows = f"{wanted} rows" if wanted == last else f"{wanted} rows (or all {last})"
        found = [f"{size // (n * w)} rows of {_words(_Layout(n, w))}" for n, w in layouts if size % (n * w) == 0]
        found += [f"{size // (r * top_k)} planes in {r} rows" for r in {wanted, last} if r and size % (r * top_k) == 0]
        return (
            f"expected {rows} of {' or '.join(map(_words, layouts))}"
            f"{' as in the first reply' if self._layout else f' ({every} layers, {moe} of them MoE)'}, "
            f"received {size} ids: {', or '.join(found) if found else 'no whole number of rows'}"
        )

    def _empty(self, rows: int) -> NDArray[np.unsignedinteger]:
        return np.empty((rows, len(self.info.layers), self.info.top_k), self.info.route_dtype)


def _words(layout: _Layout) -> str:
    return f"{layout.planes} planes x {layout.width}"
