"""Rows of .parquet, .jsonl, .json and .csv files, one at a time, those that repeat an earlier one left out.

A file of 1.8 million rows in which every prompt stands a hundred times is read in seconds: Parquet is decoded in
batches of a few columns, and only rows whose key columns are new become Python values. Knows no layout.
"""

from __future__ import annotations

import csv
import glob
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from asyncrl.errors import TaskError
from asyncrl.tasks.data.columns import value
from asyncrl.tasks.words import with_article

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")

_HEAD = 64
"""Rows of a text file of which the columns are taken."""


class Row(NamedTuple):
    """One row. where: file, and row or line in it, counted from 1."""

    where: str
    values: dict[str, Any]


class Seen:
    """What was read of the files of one source. rows: all of them; repeats: rows that say what one before said."""

    def __init__(self) -> None:
        self.rows, self.repeats = 0, 0
        self.keys: set[bytes] = set()

    def is_new(self, key: bytes) -> bool:
        """Whether no row with these values of the key columns was read before; remembers them."""
        if key in self.keys:
            return False
        self.keys.add(key)
        return True


class File:
    """A data file that is there and whose columns are known. Raises TaskError for one that cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _reading(path):
            self.columns = tuple(self._columns())
        if not self.columns:
            raise TaskError(f"{str(path)!r} is empty: it has no rows")
        if twice := [name for name, times in Counter(self.columns).items() if name and times > 1]:
            raise TaskError(f"{str(path)!r} has two columns named {twice[0]!r}; rename one of them")

    def rows(self, wanted: Sequence[str], keys: Sequence[str], seen: Seen) -> Iterator[Row]:
        """Rows with the columns `wanted`, those left out whose `keys` (paths) all equal an earlier row's.

        Raises TaskError that names file and row.
        """
        read = self._parquet_rows if self.path.suffix.lower() == ".parquet" else self._plain_rows
        before = seen.rows
        with _reading(self.path):
            yield from read(wanted, keys, seen)
        if seen.rows == before:
            raise TaskError(f"{str(self.path)!r} is empty: it has no rows")

    def _columns(self) -> list[str]:
        if self.path.suffix.lower() == ".parquet":
            from asyncrl.tasks.data import parquet

            return parquet.columns(self.path)
        if self.path.suffix.lower() == ".csv":
            return _csv_columns(self.path)
        names: dict[str, None] = {}
        for row, _ in zip(_records(self.path), range(_HEAD), strict=False):
            names |= dict.fromkeys(row.values)
        return list(names)

    def _parquet_rows(self, wanted: Sequence[str], keys: Sequence[str], seen: Seen) -> Iterator[Row]:
        from asyncrl.tasks.data import parquet

        for number, values in parquet.rows(self.path, wanted, keys, seen):
            yield Row(f"{str(self.path)!r} row {number}", values)

    def _plain_rows(self, wanted: Sequence[str], keys: Sequence[str], seen: Seen) -> Iterator[Row]:
        for row in _records(self.path):
            seen.rows += 1
            if seen.is_new(key_of(row.values, keys)):
                yield Row(row.where, {k: row.values[k] for k in wanted if k in row.values})
            else:
                seen.repeats += 1


def key_of(values: dict[str, Any], keys: Sequence[str]) -> bytes:
    """Hash of what a row has at some paths."""
    said = repr([value(values, k) for k in keys])
    return bytes(xxhash.xxh3_128_digest(said.encode("utf-8", "surrogatepass")))


def expand(path: str) -> list[Path]:
    """The files of a path or pattern, in order. Raises TaskError when there is none, or one of an unknown kind."""
    base = Path(path).expanduser()
    if base.is_file():
        found = [base]
    elif base.is_dir():
        raise TaskError(f"{path!r} is a folder; name a file, or a pattern such as {str(base / '*.parquet')!r}")
    else:
        found = sorted(Path(p) for p in glob.glob(str(base), recursive=True) if Path(p).is_file())
    if not found:
        what = "matches no file" if glob.has_magic(path) else "does not exist"
        raise TaskError(f"{path!r} {what}; relative paths begin at {str(Path.cwd())!r}")
    for file in found:
        if file.suffix.lower() not in SUFFIXES:
            raise TaskError(
                f"{str(file)!r} has the extension {file.suffix!r}; known are {', '.join(SUFFIXES)}"
                + (" (unpack it first)" if file.suffix.lower() in (".gz", ".zst", ".xz", ".zip", ".bz2") else "")
            )
    return found


def _records(path: Path) -> Iterator[Row]:
    """Rows of a text file with all their columns."""
    kind = path.suffix.lower()
    if kind == ".json":
        yield from _json(path)
    elif kind == ".jsonl":
        yield from _jsonl(path)
    else:
        yield from _csv(path)


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as handle:
        for number, line in enumerate(handle, 1):
            if line.strip():
                where = f"{str(path)!r} line {number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as exc:
                    # The position of the reader counts from the beginning of the line that `where` names.
                    why = f"{exc.msg} at column {exc.colno}" if isinstance(exc, json.JSONDecodeError) else str(exc)
                    raise TaskError(f"{where} is not JSON: {why}") from exc
                yield Row(where, _mapping(row, where))


def _json(path: Path) -> Iterator[Row]:
    text = path.read_text(encoding="utf-8-sig")
    try:
        tree = json.loads(text or "[]")
    except (ValueError, RecursionError) as exc:
        hint = "; rename it to .jsonl if every line is an object of its own" if "Extra data" in str(exc) else ""
        raise TaskError(f"{str(path)!r} is not JSON: {exc}{hint}") from exc
    rows = tree.get("data") if isinstance(tree, dict) else tree
    if not isinstance(rows, list):
        raise TaskError(f'{str(path)!r} must hold a list of objects, or {{"data": [...]}}')
    for number, row in enumerate(rows, 1):
        where = f"{str(path)!r} row {number}"
        yield Row(where, _mapping(row, where))


def _csv_columns(path: Path) -> list[str]:
    """Names of the first line, each as often as it stands there; none of a file without rows."""
    with path.open(encoding="utf-8-sig", newline="") as handle:
        names = list(csv.DictReader(handle, strict=True).fieldnames or ())
    other = next((mark for mark in (";", "\t", "|") if len(names) == 1 and mark in names[0]), None)
    if other is not None:
        raise TaskError(
            f"{str(path)!r} has {other!r} between its cells (its first line is {names[0][:80]!r}), and only commas are "
            "read; write it with commas, or as .jsonl"
        )
    return [] if next(_csv(path), None) is None else names


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default refuses cells above 128 KiB
    with path.open(encoding="utf-8-sig", newline="") as handle:
        reader = csv.DictReader(handle, strict=True)
        line = 2
        for row in reader:
            where = f"{str(path)!r} line {line}"
            if None in row or None in row.values():
                wrong = "more" if None in row else "fewer"
                raise TaskError(f"{where} has {wrong} cells than the first line has columns")
            # An empty cell is how CSV writes nothing.
            yield Row(where, {k: v or None for k, v in row.items()})
            line = reader.line_num + 1


def _mapping(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise TaskError(f"{where} is {with_article(type(row).__name__)}, where an object with columns belongs")
    return row


class _reading:
    """Errors of files and of readers become a TaskError that names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, exc: BaseException | None, trace: Any) -> None:
        if isinstance(exc, UnicodeDecodeError):
            raise TaskError(f"{str(self._path)!r} is not UTF-8 text: {exc}") from exc
        if isinstance(exc, RecursionError):
            raise TaskError(f"{str(self._path)!r} has a value that is nested too deeply") from exc
        if isinstance(exc, OSError | csv.Error):
            raise TaskError(f"{str(self._path)!r} cannot be read: {exc}") from exc
