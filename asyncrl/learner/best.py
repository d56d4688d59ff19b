"""Keeps the policy with the highest value of one evaluation metric (learner.keep_best). Rank 0 alone; no collectives.

A version is evaluated while later updates run, so its weights must outlive it: those of every version that replay is
about to evaluate are written into a folder of their own, from the host copy that publishing made anyway and on a
thread beside the training. When the evaluation is over, the folder is renamed to RUN/best, or removed.
What lies on the disk: asyncrl.learner.best_folders.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from asyncrl.config import Config
from asyncrl.errors import WeightSyncError
from asyncrl.learner.best_folders import BestFolders, Kept, Measured
from asyncrl.models.write import FolderWriter, Plan
from asyncrl.types import Version

log = logging.getLogger(__name__)

WAIT_S = 1.0
"""Longest wait for the version before to be written; the last version of a run may wait as for a checkpoint."""
WAIT_SHARE = 0.5
"""Of learner.collective_timeout_s: other ranks wait in a collective while the last version does."""
CLOSE_S = 5.0
"""Longest wait for a version that is being written when the learner ends before its last update."""


class Best:
    """The best policy of one run folder. Nothing in it is fatal: what goes wrong is logged, and training goes on."""

    def __init__(self, config: Config, epoch: int, update: int, over: bool) -> None:
        """epoch, update: where the learner begins; versions that it undoes are forgotten. over: it made its last
        update before and only waits for evaluations."""
        assert config.learner.keep_best is not None
        self._metric, self._start = config.learner.keep_best, Path(config.model.path)
        c = config.learner
        self._timeout_s = self._last_s = c.checkpoint_timeout_s
        if c.ranks > 1:
            self._last_s = min(self._timeout_s, WAIT_SHARE * c.collective_timeout_s)
        self._every, self._updates = config.eval.every, config.learner.updates
        self._due, self._asked = -1, -1
        self._job: _Job | None = None
        self._results: dict[Version, Measured] = {}
        self._names: set[str] = set()
        self._safe, self._changed = update, True
        self._folders = BestFolders(config.run_dir, self._metric)
        self.best: Kept | None = None
        self.measuring: frozenset[Version] = frozenset()
        """Versions that replay is evaluating now, as far as it said: they wait however many later ones there are."""
        try:
            if epoch == 0:
                self._folders.set_aside()
            self._folders.clean()
            for kept in self._folders.kept() if not over else ():
                if kept.version.epoch < epoch and kept.version.update > update:
                    log.warning("version %s was undone; it is no candidate for the best policy any more", kept.version)
                    self._folders.remove(kept)
        except OSError as exc:
            log.error("%s cannot be put in order: %s", self._folders.best, exc)

    # --- what is to be evaluated ----------------------------------------------------------------

    def follow(self, config: Config) -> None:
        """Go on with these settings; they take effect at replay with the same take."""
        self._updates = config.learner.updates
        if config.eval.every != self._every:
            self._every = config.eval.every
            self._due = (self._asked // self._every + 1) * self._every if self._every and self._asked >= 0 else -1

    def offer(self, version: Version, weights: Mapping[str, Tensor]) -> None:
        """A version is about to be published: write it when it will be evaluated, by the rule of replay.

        The first version of this learner counts as such: replay may measure it again. weights: the whole policy on
        the host by HF name; held until it is written.
        """
        last = version.update >= self._updates
        if not self._every or (version.update < self._due and not last):
            return
        self._asked, self._due = version.update, (version.update // self._every + 1) * self._every
        if self._job is not None and not self._job.done.wait(self._last_s if last else WAIT_S):
            log.error(
                "version %s cannot become the best policy: version %s is still being written (the disk is slow)",
                version, self._job.version,
            )  # fmt: skip
            return
        self._take()
        self._job = _Job(self._folders.place(version), version, weights, self._start)

    def withdraw(self, version: Version) -> None:
        """It was not published: the next one will be evaluated instead."""
        if version.update == self._asked:
            self._due = -1

    # --- what evaluations say -------------------------------------------------------------------

    def measured(self, version: Version, metrics: Mapping[str, float], complete: bool) -> None:
        """An evaluation is over. complete: it was not cut short."""
        value = metrics.get(self._metric)
        if value is None:
            known = {name for name in metrics if name not in ("eval/version", "eval/epoch")}
            if not known <= self._names:
                log.warning(
                    "learner.keep_best=%s: the evaluation of version %s has no such metric, it has %s",
                    self._metric, version, ", ".join(sorted(known)),
                )  # fmt: skip
            self._names |= known
        elif not math.isfinite(value):
            log.warning("version %s is no candidate for the best policy: its %s is %s", version, self._metric, value)
        self._results[version] = Measured(dict(metrics), complete)
        self._note()

    def settle(self, safe: int) -> None:
        """Put the folders in order, when something changed. safe: update of the newest checkpoint, -1 without one."""
        safe = max(safe, 0)
        if self._job is not None and self._job.done.is_set():
            self._take()
        if not self._changed and safe == self._safe:
            return
        self._safe = safe
        self._arrange(safe)

    def scalars(self) -> dict[str, float]:
        """Metrics; nothing before there is a best policy."""
        best = self.best
        if best is None or best.measured is None:
            return {}
        return {"run/best": float(best.version.update), "run/best_value": best.measured.metrics[self._metric]}

    def finish(self) -> None:
        """The run is over and its last evaluation too: only the best policy stays."""
        if self._job is not None and not self._job.done.wait(self._timeout_s):
            log.error("version %s is still being written and cannot become the best policy", self._job.version)
        self._take()
        # Nobody goes on from here, so nothing can be undone.
        self._arrange(2**62, awaited=False)
        if self.best is None:
            got = ", ".join(sorted(self._names)) or "none that is finite"
            log.warning("%s is not there: no evaluation gave %s; metrics: %s", self._folders.best, self._metric, got)

    def close(self) -> None:
        """A version that is being written is waited for at most CLOSE_S; the next learner needs it."""
        if self._job is not None and not self._job.done.wait(CLOSE_S):
            log.warning("version %s is still being written; it cannot become the best policy", self._job.version)

    def _take(self) -> None:
        """Note what is known of a version that is complete now."""
        if self._job is None or not self._job.done.is_set():
            return
        job, self._job = self._job, None
        if job.why:
            log.error("version %s cannot become the best policy: %s", job.version, job.why)
            self._results.pop(job.version, None)
        self._changed = True
        self._note()

    def _note(self) -> None:
        """Write down the results of versions whose folders are complete."""
        for version, measured in list(self._results.items()):
            if self._job is not None and self._job.version == version and not self._job.done.is_set():
                continue
            del self._results[version]
            self._changed = True
            try:
                if not self._folders.note(version, measured):
                    self._miss(version, measured)
            except OSError as exc:
                log.error("what was measured of version %s cannot be written down: %s", version, exc)

    def _miss(self, version: Version, measured: Measured) -> None:
        """Something was evaluated that is not there: said, if it would have been the best."""
        rank, best = measured.rank(self._metric, version), self.best
        top = None if best is None or best.measured is None else best.measured.rank(self._metric, best.version)
        if rank is not None and (top is None or rank > top):
            log.warning(
                "version %s has %s=%g, but its weights were not kept: the evaluation was moved to it, or it could not "
                "be written", version, self._metric, rank[1],
            )  # fmt: skip

    def _arrange(self, safe: int, awaited: bool = True) -> None:
        before = self.best
        try:
            self.best = self._folders.arrange(safe, awaited, self.measuring)
            self._changed = False
        except OSError as exc:
            log.error("%s cannot be put in order: %s", self._folders.best, exc)
            return
        best = self.best
        if best is not None and best.measured is not None and (before is None or before.version != best.version):
            value = best.measured.metrics[self._metric]
            log.info("%s is version %s now: %s=%g", self._folders.best, best.version, self._metric, value)


class _Job:
    """A version being written by a thread. why: what went wrong, or ""."""

    def __init__(self, folder: Path, version: Version, weights: Mapping[str, Tensor], start: Path) -> None:
        self.version, self.why, self.done = version, "the thread that wrote it ended; see the log", threading.Event()
        # A daemon: a disk that hangs must not keep the process.
        args = (folder, weights, start)
        threading.Thread(target=self._write, args=args, name="best", daemon=True).start()

    def _write(self, folder: Path, weights: Mapping[str, Tensor], start: Path) -> None:
        try:
            writer = FolderWriter(folder, [Plan(n, t.dtype, tuple(t.shape)) for n, t in weights.items()])
            try:
                for name, tensor in weights.items():
                    writer.add(name, tensor)
                writer.copy_rest(start, _usual(weights))
                writer.finish()
            finally:
                writer.give_up()
            self.why = ""
        except (OSError, WeightSyncError) as exc:
            self.why = str(exc)
        finally:
            self.done.set()


def _usual(weights: Mapping[str, Tensor]) -> str:
    """The dtype of most weights."""
    counts = Counter(str(t.dtype).removeprefix("torch.") for t in weights.values() if t.dtype.is_floating_point)
    return counts.most_common(1)[0][0]
