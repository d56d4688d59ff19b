"""Live settings: what was changed since the run's config, by whom, and what of it is in force. Pure: no clock, no file.

Changes are numbered from 1. The newest state is `coming`; the state `in_force` is the one under which the last take
was frozen. A take is frozen under the newest state for which a usable version exists, so that tightening max_lag never
waits for a version that the learner, which follows `coming`, did not know it had to publish.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from asyncrl import tunable
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.wire import Tuned

KEPT = 128
"""Changes in force that can still be undone."""
PENDING = 256
"""Changes that may wait for a take; twice as many when the last ones only pause."""
LONGEST = 4096
"""Characters of a tuned value: well below what a message may hold (wire.Text)."""
LONGEST_SUM = 2**15
"""Characters of all tuned values: every take, every snapshot and every Welcome has them."""
PAUSED = "weights.paused"
_REMEDY = "shorten it, or stop the run and go on with `asyncrl run RUN/config.yaml --resume KEY=VALUE`"


class Change(NamedTuple):
    """One change. values: old and new value by key, as JSON. key: of its request. undoes: numbers of other changes."""

    seq: int
    time: float
    update: int
    by: str
    key: str
    values: dict[str, tuple[str, str]]
    undoes: tuple[int, ...] = ()
    undone: bool = False


class KnobsState(NamedTuple):
    """Knobs on disk. config: value of every tuned key in the config of then."""

    config: dict[str, str]
    settled: dict[str, str]
    seq: int
    changes: list[Change]
    in_force: int
    since: int
    told: int


class Knobs:
    """The live settings of one run; without a config nothing can be changed.

    check: raises ConfigError for a config that validates, but that this replay cannot serve. untune: keys that a resume
    named, whose values in the config win over what was tuned.
    """

    def __init__(
        self, config: Config | None = None, check: Callable[[Config], None] = lambda _: None,
        untune: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.base, self._check, self._untune = config, check, set(untune)
        self._flat = tunable.flat(config) if config is not None else {}
        self._settled: dict[str, str] = {}
        self.changes: list[Change] = []
        """The newest ones, oldest first."""
        self.seq = self.in_force = self.since = 0
        self._told = 0
        self.coming = Tuned()

    @property
    def follows(self) -> bool:
        """True when the learner publishes by the state in force: it was told of it with its last take."""
        return self._told == self.in_force

    def at(self, seq: int) -> Tuned:
        """The state after change `seq`: every key whose value is not that of the config. Not before `in_force`."""
        values = dict(self._settled)
        for change in self.changes:
            if change.seq <= seq:
                values |= {key: new for key, (_, new) in change.values.items()}
        return Tuned(seq, {k: v for k, v in values.items() if v != self._flat.get(k)})

    def config(self, tuned: Tuned) -> Config:
        """The run's config with these values."""
        assert self.base is not None
        return tunable.merged_json(self.base, tuned.values)

    def state(self) -> dict[str, Any]:
        """The newest live settings and what they replace, both as JSON by key; JSON-like, for StatusReply."""
        values = dict(self.coming.values)
        config = {key: self._flat[key] for key in values}
        return {"seq": self.seq, "in_force": self.in_force, "values": values, "config": config}

    # --- changes --------------------------------------------------------------------------------

    def change(self, values: Mapping[str, str], by: str, key: str, update: int, time: float) -> Change | None:
        """New values as JSON by key; None when all are so already. ConfigError when they cannot be had.

        update: the learner's clock. A request of which the key is known was done: its change is returned again.
        """
        if (known := self.find(key)) is not None:
            return known
        new = self._validated(self.coming.values | dict(values))
        return self._add(values.keys(), new, by, key, update, time)

    def undo(self, count: int, by: str, key: str, update: int, time: float) -> Change | None:
        """Give what the last `count` changes, which are not undone, changed the values of before. As `change`."""
        if (known := self.find(key)) is not None:
            return known
        undoable = [c for c in self.changes if c.values and not c.undone and not c.undoes]
        if count > len(undoable):
            what = f"{len(undoable)} changes are left that can be undone" if undoable else "nothing is tuned"
            raise ConfigError(f"--undo {count}: {what}")
        last = undoable[len(undoable) - count :]
        old = {k: v for change in reversed(last) for k, (v, _) in change.values.items()}
        new = self._validated(self.coming.values | old)
        seqs = {c.seq for c in last}
        done = self._add(old.keys(), new, by, key, update, time, tuple(sorted(seqs)))
        self.changes = [c._replace(undone=c.undone or c.seq in seqs) for c in self.changes]
        return done

    def find(self, key: str) -> Change | None:
        """The change that a request with this key made."""
        return next((c for c in self.changes if key and c.key == key), None)

    def _validated(self, values: Mapping[str, str]) -> dict[str, str]:
        """All values in their one spelling."""
        if self.base is None:
            raise ConfigError("this replay serves no config that could be tuned")
        config = tunable.merged_json(self.base, values)
        self._check(config)
        new = tunable.flat(config)
        sizes = {key: len(value) for key, value in new.items() if value != self._flat[key]}
        for key, size in sizes.items():
            if size > LONGEST:
                raise ConfigError(f"{key}: the value has {size} characters as JSON, more than {LONGEST}; {_REMEDY}")
        if sum(sizes.values()) > LONGEST_SUM:
            raise ConfigError(
                f"{', '.join(sizes)}: the tuned values have {sum(sizes.values())} characters together, more than "
                f"{LONGEST_SUM}; {_REMEDY}"
            )
        return new

    def _add(
        self, keys: Iterable[str], new: Mapping[str, str], by: str, key: str, update: int, time: float,
        undoes: tuple[int, ...] = (),
    ) -> Change | None:  # fmt: skip
        now = self._flat | self.coming.values
        changed = {k: (now[k], new[k]) for k in keys if new[k] != now[k]}
        if not changed and not undoes:
            return None
        # The end of a pause must never be refused: takes may wait for it. Nothing else may come with it.
        pause = changed.keys() == {PAUSED}
        room = PENDING * (1 + pause)
        if self.seq - self.in_force >= room and not (pause and changed[PAUSED][1] == "false"):
            raise ConfigError(f"{room} changes wait for the next take already; wait for it")
        self.seq += 1
        self.changes.append(Change(self.seq, time, update, by, key, changed, undoes))
        self.coming = self.at(self.seq)
        return self.changes[-1]

    # --- takes ----------------------------------------------------------------------------------

    def adopt(self, update: int, newest: int) -> Config | None:
        """Put the newest state in force under which a take at `update` can be had with version `newest`.

        None when none newer than the one in force can be.
        """
        for seq in range(self.seq, self.in_force, -1):
            tuned = self.at(seq)
            max_lag = json.loads(tuned.values.get("staleness.max_lag") or self._flat["staleness.max_lag"])
            if newest + max_lag >= update:
                self.in_force, self.since = seq, update
                self._settle()
                return self.config(tuned)
        return None

    def freeze(self) -> tuple[Tuned, Tuned]:
        """What a take is frozen with: the state in force, and the one that the learner is told to publish by."""
        self._told = self.seq
        return self.at(self.in_force), self.coming

    def _settle(self) -> None:
        """Forget old changes, of which only the values stay."""
        while len(self.changes) > KEPT and self.changes[0].seq <= self.in_force:
            old = self.changes.pop(0)
            self._settled |= {key: new for key, (_, new) in old.values.items()}

    # --- the disk -------------------------------------------------------------------------------

    def save(self) -> KnobsState:
        """All of it."""
        keys = {*self._settled, *(k for c in self.changes for k in c.values)}
        config = {k: v for k, v in self._flat.items() if k in keys}
        return KnobsState(
            config, dict(self._settled), self.seq, list(self.changes), self.in_force, self.since, self._told
        )

    def load(self, state: KnobsState) -> dict[str, tuple[str, str]]:
        """Go on from there. A key whose value in the config is another now, or wins over it, is not tuned any more.

        Returns tuned and new value of those keys, and of all keys when what is left of them contradicts the config.
        """
        self.seq, self.in_force, self.since, self._told = state.seq, state.in_force, state.since, state.told
        self._settled, self.changes = dict(state.settled), list(state.changes)
        gone = {k for k, v in state.config.items() if self._flat.get(k) != v or k in self._untune}
        before = self.at(self.seq).values
        gone |= {k for seq in (self.seq, self.in_force) for k, v in self.at(seq).values.items() if len(v) > LONGEST}
        self._drop(gone)
        try:
            for seq in {self.seq, self.in_force} if self.base is not None else ():
                self.config(self.at(seq))
        except ConfigError:
            gone = set(state.config)
            self._drop(gone)
        self.coming = self.at(self.seq)
        return {k: (before[k], self._flat.get(k, "null")) for k in sorted(gone) if k in before}

    def _drop(self, keys: set[str]) -> None:
        self._settled = {k: v for k, v in self._settled.items() if k not in keys}
        self.changes = [c._replace(values={k: v for k, v in c.values.items() if k not in keys}) for c in self.changes]
