"""RUN/dumps/u<update>: what an update trained on, as files, and back.

A folder holds, for every rank, its groups as they came over the wire (length-prefixed frames), the log-probs that
the update computed for their tokens and, of a take of several updates, pi_old and what else its scoring pass found,
and of rank 0 the row table with what was selected (`table.safetensors`) and all
else as JSON (`dump.json`: names, settings, hashes of the files). With `logging.dump_policy` it also holds the policy
before that update, a model folder. Nothing is pickled. Imports torch only in `read`: `content` does without.
Knows nothing of when dumps are made (asyncrl.learner.dumping).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from asyncrl.arrays import Buffer
from asyncrl.config import Config, validate
from asyncrl.errors import ConfigError, WireError
from asyncrl.types import Group, ModelInfo
from asyncrl.wire import SCHEMA, decode_group, encode_group

if TYPE_CHECKING:
    from asyncrl.learner.table import Table

FOLDER = "dumps"
"""Of a run folder."""
HEAD, TABLE, POLICY = "dump.json", "table.safetensors", "policy"
"""Names in a dump."""
FORMAT = 3

_READABLE = {(FORMAT, SCHEMA), (2, SCHEMA), (1, 5)}
"""(format, wire schema) of the dumps that can be read. Those before format 3 have no routes of the scoring pass of
their take: nothing needed them. Those of format 1 have no log-probs of the scoring pass, and their table no column
`withheld`: 0 everywhere."""
_BEFORE_PARTS = 5
"""Wire schema in which a response had no parts of its reward yet."""
_MAGIC = b"asyncrl groups 1\n"
_COLUMN = "column."
_COUNT, _SIZE = struct.Struct("<I"), struct.Struct("<Q")


class File(msgspec.Struct, frozen=True):
    """A file of a dump. xxh3: of all of it."""

    xxh3: str
    size: int


class Head(msgspec.Struct, frozen=True):
    """dump.json. bound: tokens of versions before it do not train; carry: of the RDC quota, before the update.

    outcome: stepped, non_finite or filtered. names: (trajectory, group, generator) of every row of the table. config:
    the settings of that update, live changes included. policy: whether the policy before the update lies there.
    """

    format: int
    schema: int
    epoch: int
    update: int
    outcome: str
    bound: int
    carry: float
    ranks: int
    policy: bool
    model: dict[str, Any]
    names: list[tuple[str, str, str]]
    files: dict[str, File]
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Dump:
    """One update as it was: the groups of every rank, and what was computed of them over all ranks.

    table: all rows, in rank order. keep, would_drop bool [n], bucket int64 [n], advantages float64 [n]: as in
    learner.update.Outcome. old_logp: pi_old [S] by trajectory id of a take of several updates, else None (it is that
    of the scoring pass). logp: of the scoring pass by trajectory id, float [T], None in a dump of format 1. routes,
    scores: by trajectory id the experts [S, L, K] of the scoring pass of the take and their log-scores float32
    [S, L, K], None where the update did not need them. policy: folder of the policy before the update, or None.
    """

    folder: Path
    head: Head
    config: Config
    info: ModelInfo
    ranks: list[list[Group]]
    table: Table
    keep: NDArray[np.bool_]
    would_drop: NDArray[np.bool_]
    bucket: NDArray[np.int64]
    advantages: NDArray[np.float64]
    old_logp: dict[str, NDArray[np.floating]] | None
    policy: Path | None
    logp: dict[str, NDArray[np.floating]] | None = None
    routes: dict[str, NDArray[np.unsignedinteger]] | None = None
    scores: dict[str, NDArray[np.float32]] | None = None

    @property
    def update(self) -> int:
        """The learner's clock before the step."""
        return self.head.update


def groups_file(rank: int) -> str:
    """Name of the file with a rank's groups."""
    return f"rank{rank}.groups"


def old_file(rank: int) -> str:
    """Name of the file with a rank's pi_old."""
    return f"rank{rank}.old.safetensors"


def routes_file(rank: int) -> str:
    """Name of the file with the routes of the scoring pass of the take for a rank's responses."""
    return f"rank{rank}.routes.safetensors"


def scores_file(rank: int) -> str:
    """Name of the file with the router's log-scores of these routes."""
    return f"rank{rank}.scores.safetensors"


def logp_file(rank: int) -> str:
    """Name of the file with the log-probs of the scoring pass for a rank's response tokens."""
    return f"rank{rank}.logp.safetensors"


def pack_groups(groups: Sequence[Group]) -> Iterator[Buffer]:
    """The bytes of a groups file, piece by piece: per group the number of its frames, their sizes, the frames."""
    yield _MAGIC
    for group in groups:
        frames = encode_group(group)
        yield _COUNT.pack(len(frames))
        yield b"".join(_SIZE.pack(len(f)) for f in frames)
        yield from frames


def unpack_groups(data: bytes, schema: int = SCHEMA) -> list[Group]:
    """Groups of a file's bytes, arrays as views of them. Raises WireError on anything else.

    schema: of the wire when they were written.
    """
    if not data.startswith(_MAGIC):
        raise WireError("it does not begin as a file of groups does")
    whole, at, groups = memoryview(data), len(_MAGIC), []
    while at < len(data):
        frames: list[Buffer] = []
        try:
            (count,) = _COUNT.unpack_from(data, at)
            sizes = [n for (n,) in _SIZE.iter_unpack(whole[at + 4 : at + 4 + 8 * count])]
        except struct.error as exc:
            raise WireError(f"it is cut off at byte {at}") from exc
        at += 4 + 8 * count
        for size in sizes:
            frames.append(whole[at : at + size])
            at += size
        if at > len(data) or len(sizes) != count:
            raise WireError("it is cut off within a group")
        groups.append(decode_group(frames if schema > _BEFORE_PARTS else _with_parts(frames)))
    return groups


def _with_parts(frames: list[Buffer]) -> list[Buffer]:
    """The frames of a group as they are written today, from those of a time without parts of the reward."""
    try:
        head = msgspec.msgpack.decode(frames[1])
        head[0] = SCHEMA
        for response in head[-1]:
            response.append({})
    except (msgspec.MsgspecError, LookupError, TypeError, AttributeError) as exc:
        raise WireError(f"a group in it has no readable header ({exc})") from exc
    return [frames[0], msgspec.msgpack.encode(head), *frames[2:]]


def pack_table(table: Table, selected: Mapping[str, NDArray[Any]]) -> bytes:
    """The columns, and what was selected by them, as safetensors. float64 stays float64, NaN stays NaN."""
    columns = {_COLUMN + name: np.ascontiguousarray(values) for name, values in table.columns.items()}
    return save(columns | {name: np.ascontiguousarray(values) for name, values in selected.items()})


def named(run_dir: Path) -> dict[int, Path]:
    """Folders of the complete dumps of a run by their update, in order."""
    found = [f for f in (run_dir / FOLDER).glob("u*") if f.name[1:].isdigit() and f.is_dir()]
    return {int(f.name[1:]): f for f in sorted(found, key=lambda f: int(f.name[1:]))}


def read_head(folder: Path) -> Head:
    """dump.json of a dump. ConfigError that says what to do when it cannot be read."""
    file = folder / HEAD
    try:
        raw = file.read_bytes()
    except OSError as exc:
        raise ConfigError(
            f"{file} cannot be read ({exc}): {folder} is no dump; give a folder RUN/{FOLDER}/u<update>, which a run "
            "with logging.dump_every > 0 writes"
        ) from exc
    try:
        head = msgspec.json.decode(raw, type=Head)
    except msgspec.MsgspecError as exc:
        raise ConfigError(f"{file} is damaged ({exc}); {_REMEDY}") from exc
    if (head.format, head.schema) not in _READABLE:
        raise ConfigError(
            f"{file} is of format {head.format} with wire schema {head.schema}, this asyncrl reads {FORMAT} with "
            f"{SCHEMA}; read it with the asyncrl that wrote it"
        )
    return head


def policy_in(folder: Path, head: Head) -> Path | None:
    """The folder of the policy in a dump, None where there is none (any more)."""
    policy = folder / POLICY
    return policy if head.policy and (policy / "config.json").is_file() else None


@dataclass(frozen=True, slots=True)
class Content:
    """A dump as numpy arrays and records; the same fields as `Dump`, with the columns of the table by name."""

    folder: Path
    head: Head
    config: Config
    info: ModelInfo
    ranks: list[list[Group]]
    columns: dict[str, NDArray[np.float64]]
    keep: NDArray[np.bool_]
    would_drop: NDArray[np.bool_]
    bucket: NDArray[np.int64]
    advantages: NDArray[np.float64]
    old_logp: dict[str, NDArray[np.floating]] | None
    logp: dict[str, NDArray[np.floating]] | None
    routes: dict[str, NDArray[np.unsignedinteger]] | None
    scores: dict[str, NDArray[np.float32]] | None


def content(path: str | Path) -> Content:
    """The dump in a folder, every file checked against its hash. ConfigError names the file and what to do."""
    folder = Path(path)
    head = read_head(folder)
    files = {name: _checked(folder / name, file) for name, file in head.files.items()}
    try:
        tensors = load(files[TABLE])
        old, logp, routes, scores = (
            _by_response(files, map(name, range(head.ranks)))
            for name in (old_file, logp_file, routes_file, scores_file)
        )
        ranks = [unpack_groups(files[groups_file(rank)], head.schema) for rank in range(head.ranks)]
        columns = {n.removeprefix(_COLUMN): t for n, t in tensors.items() if n.startswith(_COLUMN)}
        if head.format == 1:
            columns.setdefault("withheld", np.zeros(len(head.names)))
        keep, would_drop, bucket, advantages = (tensors[n] for n in ("keep", "would_drop", "bucket", "advantages"))
    except (SafetensorError, KeyError, WireError) as exc:
        raise ConfigError(f"{folder} is damaged ({exc}); {_REMEDY}") from exc
    odd = next((n for n, t in tensors.items() if t.shape != (len(head.names),)), None)
    if odd is not None:
        raise ConfigError(f"{folder / TABLE} is damaged: {odd} is not of {len(head.names)} rows; {_REMEDY}")
    return Content(
        folder, head, _config(folder, head), msgspec.convert(head.model, ModelInfo), ranks, columns, keep,
        would_drop, bucket, advantages, old, logp, routes, scores,
    )  # fmt: skip


def _by_response(files: Mapping[str, bytes], names: Iterable[str]) -> dict[str, NDArray[Any]] | None:
    """Arrays by trajectory id out of the files of all ranks, None where there are none."""
    parts = [load(files[name]) for name in names if name in files]
    return {k: v for part in parts for k, v in part.items()} if parts else None


def read(path: str | Path) -> Dump:
    """As `content`, with the table that the learner's functions take. Imports torch."""
    from asyncrl.learner.table import Table

    c = content(path)
    table = Table(c.head.names, c.columns, 0, len(c.head.names))
    return Dump(
        c.folder, c.head, c.config, c.info, c.ranks, table, c.keep, c.would_drop, c.bucket, c.advantages, c.old_logp,
        policy_in(c.folder, c.head), c.logp, c.routes, c.scores,
    )  # fmt: skip


def _checked(file: Path, wanted: File) -> bytes:
    try:
        data = file.read_bytes()
    except OSError as exc:
        raise ConfigError(f"{file} cannot be read ({exc}); {_REMEDY}") from exc
    if len(data) != wanted.size or xxhash.xxh3_64_hexdigest(data) != wanted.xxh3:
        raise ConfigError(f"{file} is damaged (its hash is another one); {_REMEDY}")
    return data


def _config(folder: Path, head: Head) -> Config:
    try:
        return validate(head.config)
    except ConfigError as exc:
        raise ConfigError(
            f"{folder / HEAD} has settings that this asyncrl does not know; read it with the one that wrote it: {exc}"
        ) from exc


_REMEDY = "use another dump, or copy the folder again from where it was whole"
