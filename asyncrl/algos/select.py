"""Which responses an update drops: Router Drift Control's filter and its two alternatives.

Buckets of similar length, a quota per bucket (quota.py), the highest drift first. Everything depends on
the set of (drift, length, id) and on the update number only: not on the order of the batch, nor on how
ranks share it. Knows nothing of what the ranked number means beyond its range [0, 1].

Axes: B responses of the whole batch, over all learner ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import ArrayLike, NDArray

from asyncrl.algos.quota import apportion, update_quota

Buckets = int | Literal["auto"]
OnUndefined = Literal["keep", "drop"]


class Selection(NamedTuple):
    """What an update trains on.

    keep: bool [B]. bucket: int64 [B], length bucket of each response (undefined drift included).
    carry: fraction of the quota left for the next update. unfilled: quota that no response could fill.
    """

    keep: torch.Tensor
    bucket: torch.Tensor
    carry: float
    unfilled: int


def select(
    drift: torch.Tensor | ArrayLike,
    lengths: torch.Tensor | ArrayLike,
    ids: Sequence[str],
    q: float,
    buckets: Buckets = "auto",
    bucket_edges: Sequence[int] | None = None,
    carry: float = 0.0,
    update: int = 0,
    on_undefined: OnUndefined = "keep",
) -> Selection:
    """Drop the highest drift of each length bucket (DESIGN section 4, points 1-4).

    drift: [B] in [0, 1], NaN = undefined (never ranked; kept or dropped by `on_undefined`). lengths: [B]
    tokens. ids: [B] distinct trajectory ids. q: fraction to drop, in [0, 1). buckets: number of quantile
    buckets, "auto" = min(4, max(1, floor(q n))) with n the responses of defined drift. bucket_edges:
    ascending upper edges in tokens (inclusive; one more bucket lies above the last), instead of
    `buckets`. carry, update: the state of the filter. Ties go in the order of xxh3_64(id|update). A drift
    of exactly 0 is never dropped and one ranked response stays in every bucket that has any.
    Raises ValueError for inf, < 0 or > 1 in drift, repeated ids, unequal lengths, settings out of range.
    """
    return _select(_by_drift, drift, lengths, ids, q, buckets, bucket_edges, carry, update, on_undefined)


def select_random(
    drift: torch.Tensor | ArrayLike,
    lengths: torch.Tensor | ArrayLike,
    ids: Sequence[str],
    q: float,
    buckets: Buckets = "auto",
    bucket_edges: Sequence[int] | None = None,
    carry: float = 0.0,
    update: int = 0,
    on_undefined: OnUndefined = "keep",
) -> Selection:
    """Drop as many per bucket as `select` would, chosen by xxh3_64(id|update) instead of by drift.

    The control of an honest study. Arguments, result and errors as in `select`; responses of drift 0
    can be dropped here, those of undefined drift cannot.
    """
    return _select(_by_hash, drift, lengths, ids, q, buckets, bucket_edges, carry, update, on_undefined)


def select_outliers(
    drift: torch.Tensor | ArrayLike,
    lengths: torch.Tensor | ArrayLike,
    ids: Sequence[str],
    k: float = 4.0,
    floor: float = 0.02,
    q: float = 0.08,
    buckets: Buckets = "auto",
    bucket_edges: Sequence[int] | None = None,
    on_undefined: OnUndefined = "keep",
) -> Selection:
    """Drop responses above median + k * MAD of their bucket and above `floor`.

    MAD is the plain median of |drift - median|. There is no quota: carry and unfilled are 0, and q only
    sets the number of buckets under "auto". At least the lower half of each bucket stays. Arguments and
    errors otherwise as in `select`.
    """
    if not k >= 0 or not 0 <= floor <= 1:
        raise ValueError(f"k={k} must be >= 0 and floor={floor} in [0, 1]")
    batch = _batch(drift, lengths, ids, q, buckets, bucket_edges)
    keep = batch.keep_undefined(on_undefined)
    for members in batch.members:
        if len(members):
            values = batch.drift[members]
            median = np.median(values)
            limit = median + k * np.median(np.abs(values - median))
            keep[members[(values > limit) & (values > floor)]] = False
    return Selection(torch.from_numpy(keep), torch.from_numpy(batch.bucket), 0.0, 0)


def unit_signal(values: torch.Tensor) -> torch.Tensor:
    """Map a signal in [0, inf), such as the mean |log-ratio| of a response, into [0, 1) for ranking.

    values: [B], NaN stays NaN. Returns float64 [B], x / (1 + x): the order is kept.
    """
    x_B = values.double()
    return x_B / (1 + x_B)


@dataclass(frozen=True, slots=True)
class _Batch:
    drift: NDArray[np.float64]
    ids: list[str]
    bucket: NDArray[np.int64]
    members: list[NDArray[np.int64]]
    """Positions of the responses with a defined drift, per bucket."""

    @property
    def sizes(self) -> list[int]:
        return [len(m) for m in self.members]

    def keep_undefined(self, on_undefined: OnUndefined) -> NDArray[np.bool_]:
        if on_undefined not in ("keep", "drop"):
            raise ValueError(f"on_undefined={on_undefined!r} must be 'keep' or 'drop'")
        if on_undefined == "keep":
            return np.ones(len(self.drift), dtype=np.bool_)
        return ~np.isnan(self.drift)


def _select(
    order: Callable[[_Batch, int, int], tuple[float, int, str]],
    drift: torch.Tensor | ArrayLike,
    lengths: torch.Tensor | ArrayLike,
    ids: Sequence[str],
    q: float,
    buckets: Buckets,
    bucket_edges: Sequence[int] | None,
    carry: float,
    update: int,
    on_undefined: OnUndefined,
) -> Selection:
    batch = _batch(drift, lengths, ids, q, buckets, bucket_edges)
    keep = batch.keep_undefined(on_undefined)
    quota, next_carry = update_quota(q, sum(batch.sizes), carry)
    dropped = 0
    for share, members in zip(apportion(q, batch.sizes, quota, carry, update), batch.members, strict=True):
        count = min(share, len(members) - 1, int((batch.drift[members] > 0).sum()))
        if count > 0:
            ranked = sorted(members.tolist(), key=lambda i: order(batch, update, i))
            keep[ranked[:count]] = False
            dropped += count
    return Selection(torch.from_numpy(keep), torch.from_numpy(batch.bucket), next_carry, quota - dropped)


def _by_drift(batch: _Batch, update: int, i: int) -> tuple[float, int, str]:
    return (-float(batch.drift[i]), *_tie(batch.ids[i], update))


def _by_hash(batch: _Batch, update: int, i: int) -> tuple[float, int, str]:
    return (0.0, *_tie(batch.ids[i], update))


def _tie(response_id: str, update: int) -> tuple[int, str]:
    # The update is hashed too, so that no sibling is always the victim.
    return xxhash.xxh3_64_intdigest(f"{response_id}|{update}".encode()), response_id


def _batch(
    drift: torch.Tensor | ArrayLike,
    lengths: torch.Tensor | ArrayLike,
    ids: Sequence[str],
    q: float,
    buckets: Buckets,
    bucket_edges: Sequence[int] | None,
) -> _Batch:
    """Check the arguments and assign length buckets."""
    values, sizes, names = _array(drift), _array(lengths).astype(np.int64), [str(i) for i in ids]
    if values.ndim != 1 or values.shape != sizes.shape or len(names) != len(values):
        raise ValueError(f"drift, lengths and ids must be [B], got {values.shape}, {sizes.shape} and {len(names)} ids")
    bad = np.flatnonzero(~np.isnan(values) & ~((values >= 0) & (values <= 1)))
    if len(bad):
        raise ValueError(f"drift of response {names[bad[0]]!r} is {values[bad[0]]}: outside [0, 1]")
    if len(set(names)) != len(names):
        raise ValueError("ids must be distinct")
    if not 0 <= q < 1:
        raise ValueError(f"q={q} must be in [0, 1)")
    defined = ~np.isnan(values)
    if bucket_edges is not None:
        count, bucket = len(bucket_edges) + 1, _bucket_by_edges(sizes, bucket_edges)
    else:
        count = _num_buckets(buckets, q, int(defined.sum()))
        bucket = _bucket_by_rank(sizes, names, count)
    members = [np.flatnonzero((bucket == b) & defined) for b in range(count)]
    return _Batch(values, names, bucket, members)


def _array(values: torch.Tensor | ArrayLike) -> NDArray[np.float64]:
    # float64 holds every token count exactly.
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def _num_buckets(buckets: Buckets, q: float, n: int) -> int:
    if buckets == "auto":
        return min(4, max(1, int(q * n + 1e-9)))
    if isinstance(buckets, bool) or not isinstance(buckets, int) or buckets < 1:
        raise ValueError(f"buckets={buckets!r} must be 'auto' or a whole number >= 1")
    return buckets


def _bucket_by_rank(lengths: NDArray[np.int64], ids: Sequence[str], count: int) -> NDArray[np.int64]:
    """Quantile buckets: cut the order by (length, id) into `count` parts whose sizes differ by one at most."""
    ranked = sorted(range(len(ids)), key=lambda i: (int(lengths[i]), ids[i]))
    bucket = np.zeros(len(ids), dtype=np.int64)
    for rank, i in enumerate(ranked):
        bucket[i] = rank * count // len(ids)
    return bucket


def _bucket_by_edges(lengths: NDArray[np.int64], edges: Sequence[int]) -> NDArray[np.int64]:
    if not len(edges) or list(edges) != sorted(set(edges)):
        raise ValueError(f"bucket_edges={list(edges)} must ascend without repeats")
    return np.searchsorted(np.asarray(edges), lengths, side="left").astype(np.int64)
