"""Rows of a Parquet file whose key columns say something new, found without making Python values of the others.

Batches of a few columns are decoded, the keys of each are encoded as small numbers, and one row of each different
combination is looked at. Knows no layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import TaskError
from asyncrl.tasks.data.columns import find

if TYPE_CHECKING:
    from asyncrl.tasks.data.files import Seen

BATCH = 65536
"""Rows that are decoded at once."""


def columns(path: Path) -> list[str]:
    """Names of the columns, from the end of the file. Raises TaskError for what is no Parquet file."""
    return list(_open(path).schema_arrow.names)


def rows(path: Path, wanted: Sequence[str], keys: Sequence[str], seen: Seen) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row number from 1, values) of each row that is new by its keys. Raises TaskError."""
    import pyarrow as pa

    from asyncrl.tasks.data.files import key_of

    start = 1
    try:
        for batch in _open(path).iter_batches(batch_size=BATCH, columns=list(wanted)):
            first, times = different(batch, keys)
            seen.rows += batch.num_rows
            narrow = batch.take(pa.array(first)).select(_columns_of(keys, batch.schema.names)).to_pylist()
            fresh = [i for i, row in enumerate(narrow) if seen.is_new(key_of(row, keys))]
            seen.repeats += int(times.sum()) - len(fresh)
            for index, row in zip(first[fresh], batch.take(pa.array(first[fresh])).to_pylist(), strict=True):
                yield start + int(index), row
            start += batch.num_rows
    except pa.ArrowException as exc:
        raise TaskError(f"{str(path)!r} cannot be read: {exc}") from exc


def _open(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except pa.ArrowException as exc:
        raise TaskError(f"{str(path)!r} is no Parquet file: {exc}") from exc


def _columns_of(keys: Sequence[str], names: Sequence[str]) -> list[str]:
    """Columns in which the values at some paths lie."""
    found = [find(key, names) or find(key.partition(".")[0], names) for key in keys]
    return list(dict.fromkeys(name for name in found if name is not None))


def different(batch: Any, keys: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(first row, number of rows) of each different combination of the keys' columns, in the order of the rows."""
    codes: list[NDArray[np.int64]] = []
    for name in _columns_of(keys, batch.schema.names):
        found = _codes(batch.column(name), [k for k in keys if k.lower().startswith(f"{name.lower()}.")])
        if found is None:  # a type that is not taken apart here: every row is looked at
            return np.arange(batch.num_rows), np.ones(batch.num_rows, np.int64)
        codes += found
    if not codes:
        return np.arange(batch.num_rows), np.ones(batch.num_rows, np.int64)
    joint = codes[0]
    for code in codes[1:]:
        joint = _numbers(joint * (int(code.max()) + 2) + code)  # small again, so that no product can overflow
    joint = _numbers(joint)
    count = int(joint.max()) + 1
    first = np.empty(count, np.int64)
    first[joint[::-1]] = np.arange(len(joint))[::-1]  # the first row writes last
    return first, np.bincount(joint, minlength=count)


def _numbers(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Values as 0, 1, ... in the order in which they first come, without sorting."""
    import pyarrow as pa

    return np.asarray(pa.array(values).dictionary_encode().indices).astype(np.int64)


def _codes(column: Any, paths: Sequence[str]) -> list[NDArray[np.int64]] | None:
    """Numbers that are equal where the values are; one array [rows] per leaf. None for a type with no easy leaves."""
    import pyarrow.compute as pc
    import pyarrow.types as pt

    kind = column.type
    if pt.is_dictionary(kind):
        column, kind = column.dictionary_decode(), kind.value_type
    if pt.is_struct(kind):
        fields = [f.name for f in kind]
        named = [find(p.split(".")[1], fields) for p in paths]
        found: list[NDArray[np.int64]] = []
        # is_valid first: the fields of a struct that is null are not to be trusted
        found.append(np.asarray(column.is_valid()).astype(np.int64))
        for name in [n for n in named if n is not None] or fields:
            inner = _codes(pc.struct_field(column, name), ())
            if inner is None:
                return None
            found += inner
        return found
    if pt.is_list(kind) or pt.is_large_list(kind):
        if column.null_count or not len(column):
            return None
        lengths = np.asarray(column.value_lengths())
        if lengths.min() != lengths.max() or not 1 <= lengths[0] <= 8:
            return None
        inner = _codes(column.flatten(), ())
        return None if inner is None else [c for a in inner for c in a.reshape(len(column), -1).T]
    if not (pt.is_string(kind) or pt.is_large_string(kind) or pt.is_integer(kind) or pt.is_floating(kind)):
        return None
    numbers = column.dictionary_encode().indices.fill_null(-1)
    return [np.asarray(numbers).astype(np.int64)]
