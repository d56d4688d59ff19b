"""The responses of a run's dumps that are asked for, with all that is known of them. Numpy only, one dump at a time."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.config import Config
from asyncrl.errors import ConfigError, TaskError
from asyncrl.learner.dump import Content, content, policy_in
from asyncrl.learner.dumped import dumps_in, epochs_of, is_undone
from asyncrl.samples.pieces import Pieces, Unknown
from asyncrl.types import Group, Trajectory

log = logging.getLogger(__name__)

Order = Literal["newest", "drift", "lag", "length"]

Floats = NDArray[np.floating]


class NoSample(ConfigError):
    """Nothing is as asked for."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which responses. updates: of the dumps, all when empty; reward, dropped, source: only those.

    order: newest dump first, or the highest drift, lag or length first. limit: at most so many. model: where the
    folder with the tokenizer lies now.
    """

    run_dir: Path
    updates: tuple[int, ...] = ()
    order: Order = "newest"
    reward: float | None = None
    dropped: bool = False
    source: str | None = None
    limit: int = 8
    model: Path | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """Text of the tokens [start, end) of a response. ratio: their log pi/mu, the one that is furthest from 0 where
    there are several, None where it is not known. sampled: the policy sampled them."""

    text: str
    start: int
    end: int
    ratio: float | None
    sampled: bool


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) that were sampled under one version, so many updates before they were used."""

    version: str
    start: int
    end: int
    lag: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One response. Numbers as in the table of its update; NaN where undefined.

    ratio: log pi/mu by token [T], NaN where unknown, None without log-probs in the dump. took: what became of it in
    the update, in words.
    """

    update: int
    name: str
    prompt: str
    parts: list[Part]
    gold: str
    verifier: str
    data_source: str
    generator: str
    reward: float
    rewards: Mapping[str, float]
    advantage: float
    length: int
    trained: int
    finish: str
    lag: int
    spans: list[Span]
    drift: float
    bucket: int
    took: str
    ratio: Floats | None
    scorer: str = ""
    """What gave the reward instead of the verifier: the environment, or the user's function; "" without."""

    @property
    def mean_ratio(self) -> float:
        """Mean |log pi/mu| of the tokens where it is known, NaN without one."""
        known = np.zeros(0) if self.ratio is None else self.ratio[~np.isnan(self.ratio)]
        return float(np.abs(known).mean()) if known.size else math.nan


@dataclass(slots=True)
class Found:
    """What was found. total: responses that are as asked for, in the dumps that were looked at; seen: all of them."""

    samples: list[Sample] = field(default_factory=list)
    total: int = 0
    seen: int = 0
    updates: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Row:
    """A response in its dump, before its text is made."""

    key: tuple[float, ...]
    dump: _Source
    place: int
    group: Group
    response: Trajectory
    logp: Floats | None


@dataclass(frozen=True, slots=True)
class _Source:
    """What stays of a dump: its numbers by response, and nothing by token."""

    update: int
    head_bound: int
    mode: str
    outcome: str
    columns: Mapping[str, NDArray[np.float64]]
    keep: NDArray[np.bool_]
    would_drop: NDArray[np.bool_]
    bucket: NDArray[np.int64]
    advantages: NDArray[np.float64]
    folders: tuple[Path, ...]
    scorer: str


def find(wanted: Wanted) -> Found:
    """Read the dumps and choose. A damaged dump is left out and noted; ConfigError where nothing is left."""
    if wanted.model is not None and not wanted.model.is_dir():
        raise ConfigError(f"--model {str(wanted.model)!r} is no folder; give the one that has the tokenizer")
    found, rows = Found(), list[_Row]()
    sources: set[str] = set()
    damaged: list[ConfigError] = []
    epochs = epochs_of(wanted.run_dir)
    for update, folder in reversed(dumps_in(wanted.run_dir, wanted.updates).items()):
        if wanted.order == "newest" and len(rows) >= wanted.limit and not wanted.updates:
            break
        try:
            dump = content(folder)
        except ConfigError as exc:
            damaged.append(exc)
            found.notes.append(f"left out: {exc}")
            continue
        if is_undone(update, dump.head.epoch, epochs):
            found.notes.append(
                f"the dump of update {update} is of run epoch {dump.head.epoch}, which a later learner undid"
                + ("" if wanted.updates else "; it is left out, --update takes it in")
            )
            if not wanted.updates:
                continue
        if dump.logp is None:
            found.notes.append(f"the dump of update {update} has no learner log-probs (it is of an earlier asyncrl)")
        found.updates.append(update)
        found.seen += len(dump.head.names)
        sources.update(g.prompt.data_source for groups in dump.ranks for g in groups)
        mine = list(_rows(dump, wanted))
        found.total += len(mine)
        rows = sorted([*rows, *mine], key=lambda r: r.key)[: wanted.limit]
        # What is not shown need not stay in memory: arrays are views of whole files.
        rows = [_own(r) for r in rows]
    if not found.updates and damaged:
        raise damaged[0]
    if not found.updates:
        raise ConfigError(f"{wanted.run_dir} has only dumps that a later learner undid; name one with --update")
    if not rows:
        raise NoSample(_nothing(wanted, found, sources))
    found.samples = _shown(rows, wanted, found.notes)
    return found


def _nothing(wanted: Wanted, found: Found, sources: set[str]) -> str:
    asked = [f"reward {wanted.reward:g}"] if wanted.reward is not None else []
    asked += ["dropped by the filter"] if wanted.dropped else []
    asked += [f"of data source {wanted.source!r}"] if wanted.source is not None else []
    hint = f"; data sources: {', '.join(sorted(sources)) or 'none'}" if wanted.source is not None else ""
    return (
        f"none of the {found.seen} responses in the dumps of update {', '.join(map(str, sorted(found.updates)))} is "
        f"{' and '.join(asked) or 'there'}{hint}"
    )


def _rows(dump: Content, wanted: Wanted) -> Iterator[_Row]:
    """The responses of a dump that are as asked for."""
    c = dump.columns
    folders = [f for f in (wanted.model, policy_in(dump.folder, dump.head), Path(dump.config.model.path)) if f]
    source = _Source(
        dump.head.update, dump.head.bound, dump.config.algorithm.rdc.mode, dump.head.outcome, c, dump.keep,
        dump.would_drop, dump.bucket, dump.advantages, tuple(folders), _scorer(dump.config),
    )  # fmt: skip
    order: Callable[[int], float] = {
        "newest": lambda i: -float(dump.head.update),
        "drift": lambda i: math.inf if math.isnan(c["drift"][i]) else -float(c["drift"][i]),
        "lag": lambda i: -float(c["lag"][i]),
        "length": lambda i: -float(c["length"][i]),
    }[wanted.order]
    responses = [(g, t) for groups in dump.ranks for g in groups for t in g.trajectories]
    if [t.trajectory_id for _, t in responses] != [n[0] for n in dump.head.names]:
        raise ConfigError(f"{dump.folder} is damaged: its groups are not those of its table; use another dump")
    for i, (group, response) in enumerate(responses):
        if wanted.reward is not None and not math.isclose(c["reward"][i], wanted.reward, abs_tol=1e-9):
            continue
        if wanted.dropped and not dump.would_drop[i]:
            continue
        if wanted.source is not None and group.prompt.data_source != wanted.source:
            continue
        logp = None if dump.logp is None else dump.logp.get(response.trajectory_id)
        yield _Row((order(i), -float(dump.head.update), float(i)), source, i, group, response, logp)


def _own(row: _Row) -> _Row:
    """The row without views of a file's bytes, and without routes."""
    t, source = row.response, row.dump
    if t.token_ids.base is None and t.routes is None:
        return row
    mine = Trajectory(
        t.trajectory_id, t.token_ids.copy(), t.logprobs.copy(), t.loss_mask.copy(), t.segments, t.reward,
        t.finish_reason, parts=t.parts,
    )  # fmt: skip
    g = row.group
    group = Group(g.group_id, g.prompt, g.generator_id, g.attempt, g.temperature, ())
    return _Row(row.key, source, row.place, group, mine, row.logp)


def _shown(rows: Sequence[_Row], wanted: Wanted, notes: list[str]) -> list[Sample]:
    decoders: dict[tuple[Path, ...], Pieces] = {}
    out = []
    for row in rows:
        folders = row.dump.folders
        if folders not in decoders:
            decoders[folders] = _decoder(folders, notes)
        out.append(_sample(row, decoders[folders]))
    return out


def _decoder(folders: Sequence[Path], notes: list[str]) -> Pieces:
    why = ""
    for folder in folders:
        try:
            return Pieces(folder)
        except TaskError as exc:
            why = why or str(exc)
    note = f"tokens are shown by their ids: {why}; give the folder with the tokenizer as --model"
    if note not in notes:
        notes.append(note)
    return Unknown()


def _sample(row: _Row, decoder: Pieces) -> Sample:
    t, d, i, prompt = row.response, row.dump, row.place, row.group.prompt
    ratio = None
    if row.logp is not None:
        ratio = (row.logp.astype(np.float64) - t.logprobs).astype(np.float64)
        ratio[~t.loss_mask] = np.nan
    ids = t.token_ids.tolist()
    parts = [
        Part(p.text, p.start, p.end, _most(ratio, p.start, p.end), bool(t.loss_mask[p.start])) for p in decoder.of(ids)
    ]
    spans = [Span(str(s.version), s.start, s.end, d.update - s.version.update) for s in t.segments]
    return Sample(
        d.update, t.trajectory_id, decoder.text(prompt.token_ids.tolist()), parts, prompt.answer, prompt.source,
        prompt.data_source, row.group.generator_id, t.reward, t.parts, float(d.advantages[i]), t.num_tokens,
        int(d.columns["tokens"][i]), t.finish_reason, int(d.columns["lag"][i]), spans, float(d.columns["drift"][i]),
        int(d.bucket[i]), _took(d, i), ratio, d.scorer,
    )  # fmt: skip


def _scorer(config: Config) -> str:
    if config.task.environment is not None:
        return f"environment {config.task.environment}"
    return f"reward {config.task.reward}" if config.task.reward is not None else ""


def _most(ratio: Floats | None, start: int, end: int) -> float | None:
    known = [] if ratio is None else [float(x) for x in ratio[start:end] if not math.isnan(x)]
    return max(known, key=abs, default=None)


def _took(d: _Source, i: int) -> str:
    """What became of a response in its update."""
    if d.outcome != "stepped":
        return f"the update was skipped ({d.outcome})"
    if d.columns["tokens"][i] == 0:
        return "not trained: no token may train (too old, cut off and masked, or empty)"
    if not d.keep[i]:
        return "dropped by the filter"
    words = "kept, no signal (advantage 0)" if d.advantages[i] == 0 else "kept"
    return words + (f"; the filter would drop it (mode {d.mode})" if d.would_drop[i] else "")
