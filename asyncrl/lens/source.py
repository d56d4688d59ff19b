"""Which dumps of a run are looked at, and where the policies lie. Every fault is a ConfigError with its remedy."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.config import Config, load_config
from asyncrl.errors import ConfigError
from asyncrl.learner.dump import FOLDER, Dump, named, policy_in, read, read_head
from asyncrl.learner.dumped import dumps_in, epochs_of, is_undone
from asyncrl.learner.export import FINAL, export_step
from asyncrl.learner.stored import FOLDER as CHECKPOINTS
from asyncrl.learner.stored import by_age
from asyncrl.learner.stored import names as checkpoints

log = logging.getLogger(__name__)

START = "start"
"""The step of the model that the run began with."""


def dumps_of(run_dir: Path, updates: Sequence[int], notes: list[str]) -> list[Dump]:
    """The dumps of some updates, or all of them but those that a resumed learner undid (which is noted).

    A damaged one is left out and noted; ConfigError where none is left.
    """
    there = dumps_in(run_dir, updates)
    epochs = epochs_of(run_dir)
    chosen: list[Dump] = []
    damaged: list[ConfigError] = []
    for update, folder in there.items():
        try:
            dump = read(folder)
        except ConfigError as exc:
            damaged.append(exc)
            notes.append(f"left out: {exc}")
            continue
        epoch = dump.head.epoch
        if is_undone(update, epoch, epochs):
            notes.append(
                f"the dump of update {update} is of run epoch {epoch}, which a later learner undid"
                + ("" if updates else "; it is left out, --update takes it in")
            )
            if not updates:
                continue
        chosen.append(dump)
    if not chosen and damaged:
        raise damaged[0]
    if not chosen:
        raise ConfigError(f"{run_dir / FOLDER} has only dumps that a later learner undid; name one with --update")
    _check(chosen)
    return chosen


def _check(dumps: Sequence[Dump]) -> None:
    for dump in dumps:
        if not dump.info.is_moe:
            raise ConfigError(
                f"{dump.folder}: {dump.config.model.path!r} is a dense model, nothing routes there and there is no "
                "drift; look at mismatch/* of metrics.jsonl instead"
            )
        if dump.info != dumps[0].info:
            raise ConfigError(
                f"{dump.folder} is of another model than {dumps[0].folder}; name those of one model with --update"
            )


@dataclass(slots=True)
class Policies:
    """Model folders of a run's policies by step. scratch: where checkpoints are exported to.

    Steps: the number of an update, `final`, `last` (the newest checkpoint) and `start`.
    """

    run_dir: Path
    scratch: Path
    start: str | None = None
    _exported: dict[str, Path] = field(default_factory=dict)

    def own(self, dump: Dump) -> Path | None:
        """The policy before a dump's update: in the dump, or a checkpoint of that update."""
        if dump.policy is not None:
            return dump.policy
        return self._checkpoint(str(dump.update)) if f"u{dump.update}" in self._checkpoints() else None

    def of(self, step: str) -> Path:
        """The policy of a step."""
        if step == START:
            return self._start()
        final = self.run_dir / FINAL
        if step == "final" and (final / "config.json").is_file():
            return final
        if step.isdigit() and f"u{step}" not in self._checkpoints():
            folder = self._dumped().get(int(step))
            if folder is not None:
                return folder
        if step in self.steps():
            return self._checkpoint(step)
        raise ConfigError(
            f"{self.run_dir} has no policy of step {step!r}; it has {', '.join(self.steps())}. Dumps hold theirs with "
            "logging.dump_policy=true; checkpoints are gone when a run is over"
        )

    def steps(self) -> list[str]:
        """The steps that there are, in their order; `last` where there is a checkpoint."""
        saved = {int(name[1:]) for name in self._checkpoints()}
        final = ["final"] if (self.run_dir / FINAL / "config.json").is_file() else []
        return [START, *map(str, sorted(saved.union(self._dumped()))), *(["last"] if saved else []), *final]

    def update_of(self, step: str) -> int:
        """The learner's clock of a step that there is."""
        if step == START:
            return 0
        if step == "last":
            return int(by_age(self.run_dir / CHECKPOINTS)[0].name[1:])
        return int(step) if step.isdigit() else self._config().learner.updates

    def newest(self) -> str:
        """The step to compare with when none is named."""
        return self.steps()[-1]

    def _dumped(self) -> dict[int, Path]:
        """Policies in dumps, by update."""
        found = {}
        for update, folder in named(self.run_dir).items():
            # What is wrong with a head was noted where the dump was to be read.
            with suppress(ConfigError):
                found[update] = policy_in(folder, read_head(folder))
        return {u: f for u, f in found.items() if f is not None}

    def _checkpoints(self) -> list[str]:
        return checkpoints(self.run_dir / CHECKPOINTS)

    def _config(self) -> Config:
        return load_config([str(self.run_dir / "config.yaml")], [])

    def _start(self) -> Path:
        folder = Path(self.start or self._config().model.path)
        if not (folder / "config.json").is_file():
            raise ConfigError(f"the start model {str(folder)!r} has no config.json; give where it lies now as --model")
        return folder

    def _checkpoint(self, step: str) -> Path:
        """A checkpoint as a model folder, in the precision in which the learner held it."""
        if step not in self._exported:
            folder = self.scratch / step
            dtype = "float64" if self._config().model.dtype == "float64" else "float32"
            export_step(self.run_dir, step, folder, dtype, self.start)
            self._exported[step] = folder
        return self._exported[step]
