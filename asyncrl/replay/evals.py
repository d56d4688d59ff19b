"""When evaluations open and close, and who serves them. Pure: versions, generators and `now` are passed in.

An evaluation opens with the first published version, with the first one at or after every `every`
updates, and with the last one of the run. Generators that hold exactly its version serve it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from asyncrl.replay.evaluation import Evaluation
from asyncrl.replay.tally import Tally
from asyncrl.tasks.held_out import Asked, set_of
from asyncrl.types import Prompt, Version
from asyncrl.wire import EvalResult, LeaseMsg

log = logging.getLogger(__name__)

DETAILED = 8
"""Newest finished evaluations whose numbers by set are kept: each is recorded within an update, and replay sends all
that it keeps with every state."""


class EvalsState(NamedTuple):
    """Evaluations on disk. open: the version that each was asked for, and the one that it measures now."""

    finished: list[dict[str, Any]]
    asked: list[Version]
    due: int
    open: list[tuple[Version, Version]]


class Evaluations:
    """Open and finished evaluations of a run. every = 0 is off.

    sets: what is asked of a set instead of samples and greedy, by the name of the set (Prompt.data_source). ValueError
    for a name without a prompt, and for two prompts of one id, whose answers could not be told apart. timeout_s bounds
    an evaluation from its first lease on, and from `finish` on in any case.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        tally: Tally,
        *,
        every: int,
        samples: int = 1,
        greedy: bool = True,
        sets: Mapping[str, Asked] | None = None,
        timeout_s: float = 180.0,
        lease_timeout_s: float = 120.0,
        max_attempts: int = 5,
        names_answers: bool = True,
    ) -> None:
        self.finished: list[dict[str, Any]] = []
        self._cancelled: list[tuple[str, str]] = []
        self._prompts, self._tally, self._names_answers = prompts, tally, names_answers
        self._every = every if len(prompts) else 0
        self._asked_of = {set_of(p): (sets or {}).get(set_of(p), Asked(samples, greedy)) for p in prompts}
        if unknown := set(sets or ()) - set(self._asked_of):
            raise ValueError(f"no held-out prompt is of {sorted(unknown)}; there are {sorted(self._asked_of)}")
        if len({p.prompt_id for p in prompts}) < len(prompts):
            raise ValueError("two held-out prompts have the same prompt_id; ids must differ, also between sets")
        self._timeout_s, self._lease_timeout_s, self._max_attempts = timeout_s, lease_timeout_s, max_attempts
        self._open: list[Evaluation] = []
        self._asked: set[Version] = set()
        self._due = 0
        self._deadline = math.inf

    def tune(self, every: int) -> None:
        """Another number of updates between evaluations; 0 opens no more of them."""
        every = every if len(self._prompts) else 0
        if every != self._every:
            self._every = every
            self._due_again()

    def _due_again(self) -> None:
        if self._every:
            self._due = (max((v.update for v in self._asked), default=-1) // self._every + 1) * self._every

    @property
    def num_open(self) -> int:
        """Evaluations that are not finished."""
        return len(self._open)

    @property
    def measuring(self) -> list[Version]:
        """Versions of the evaluations that are not finished."""
        return [e.target for e in self._open]

    def save(self) -> EvalsState:
        """All but the answers of open evaluations, which are asked for again."""
        opened = [(e.requested, e.target) for e in self._open]
        return EvalsState(list(self.finished), sorted(self._asked), self._due, opened)

    def load(self, state: EvalsState) -> None:
        """Go on from there."""
        self.finished[:] = state.finished
        self._asked, self._due = set(state.asked), state.due
        for requested, target in state.open:
            self._open.append(self._new(requested))
            self._open[-1].restart(target)

    def publish(self, version: Version) -> None:
        """Open an evaluation when this version is the first one at or after the next due update."""
        if self._every and version.update >= self._due:
            self._due = (version.update // self._every + 1) * self._every
            self._start(version)

    def roll_back(self, lost: Callable[[Version], bool]) -> None:
        """The learner went back: what measured a lost version is void, and due again from there on."""
        for evaluation in [e for e in self._open if lost(e.target)]:
            self._tally.count("eval_rolled_back")
            self._open.remove(evaluation)
            self._cancel(evaluation)
        self.finished[:] = [e for e in self.finished if not lost(Version(e["epoch"], e["version"]))]
        self._asked = {v for v in self._asked if not lost(v)}
        self._due_again()

    def finish(self, version: Version | None, now: float) -> None:
        """The run made its last update: evaluate `version` unless that was asked for, all within timeout_s."""
        if self._deadline < math.inf:
            return
        self._deadline = now + self._timeout_s
        if self._every and version is not None and version not in self._asked:
            self._start(version)

    def lease(self, generator_id: str, held: Version, rows: int, now: float) -> list[LeaseMsg]:
        """Up to `rows` responses for a generator that holds exactly an open evaluation's version."""
        out: list[LeaseMsg] = []
        for evaluation in self._open:
            if evaluation.target == held and len(out) < rows:
                out += evaluation.lease(generator_id, rows - len(out), now, self._lease_timeout_s)
        return out

    def put(self, result: EvalResult) -> None:
        """Answers of a generator. Those of another version than the evaluation's are asked for again."""
        evaluation = next((e for e in self._open if e.eval_id == result.eval_id), None)
        version = Version(*result.version)
        if evaluation is not None and evaluation.count == 0 and version > evaluation.target:
            self._restart(evaluation, version)
        for answer in result.answers:
            if evaluation is None or version != evaluation.target:
                self._tally.count("eval_late" if evaluation is None else "eval_other_version")
                if evaluation is not None:
                    evaluation.refuse(answer, self._max_attempts)
            elif not (math.isfinite(answer.reward) and evaluation.answer(answer)):
                self._tally.count("eval_duplicate")
        self._close(lambda e: e.complete)

    def fail(self, generator_id: str, lease_id: str, reason: str) -> bool:
        """A generator gives an evaluation lease back. False when it holds no such lease."""
        held = (out for e in self._open for out in e.outstanding)
        if not any(o.lease_id == lease_id and o.generator_id == generator_id for o in held):
            return False
        for evaluation in self._open:
            evaluation.release(self._max_attempts, lease_id=lease_id)
        self._tally.count_foreign("eval_failed", reason)
        self._close(lambda e: e.complete)
        return True

    def generator_lost(self, generator_id: str) -> None:
        """Lease again what a generator was sampling."""
        for evaluation in self._open:
            evaluation.release(self._max_attempts, generator_id=generator_id)

    def bar(self, generator_id: str) -> None:
        """The same for one that is not to be trusted, which is to stop."""
        for evaluation in self._open:
            mine = [out for out in evaluation.outstanding if out.generator_id == generator_id]
            self._cancelled += [(out.generator_id, out.lease_id) for out in mine]
        self.generator_lost(generator_id)

    def tick(self, newest: Version | None, held: Collection[Version], now: float) -> None:
        """Expire leases, move evaluations whose version nobody can have any more, close late ones.

        held: versions of the generators that are alive.
        """
        for evaluation in self._open:
            evaluation.release(self._max_attempts, now=now)
        gone = [e for e in self._open if newest is not None and e.target != newest and e.target not in held]
        for evaluation in gone:
            if newest is not None and newest not in self._asked:
                self._restart(evaluation, newest)
        # Where the newest version has an evaluation of its own, a second one would repeat it.
        self._close(lambda e: e.complete or self._late(e, now) or (e in gone and e.target != newest))

    def drain_cancelled(self) -> list[tuple[str, str]]:
        """(generator, lease id) of leases whose evaluation is over or moved, since the last call."""
        out, self._cancelled = self._cancelled, []
        return out

    def _late(self, evaluation: Evaluation, now: float) -> bool:
        started = math.inf if evaluation.started is None else evaluation.started
        return now >= min(started + self._timeout_s, self._deadline)

    def _start(self, version: Version) -> None:
        # One that nobody has begun would only measure the new version a second time.
        idle = [e for e in self._open if e.count == 0 and not e.outstanding]
        for evaluation in idle:
            self._tally.count("eval_superseded")
            self._open.remove(evaluation)
        self._asked.add(version)
        self._open.append(self._new(version))

    def _new(self, version: Version) -> Evaluation:
        return Evaluation(str(version), version, self._prompts, self._asked_of, self._names_answers)

    def _restart(self, evaluation: Evaluation, version: Version) -> None:
        log.warning("evaluation %s: nobody holds %s, uses %s", evaluation.eval_id, evaluation.target, version)
        self._tally.count("eval_moved")
        self._cancel(evaluation)
        self._asked.add(version)
        evaluation.restart(version)

    def _cancel(self, evaluation: Evaluation) -> None:
        self._cancelled += [(out.generator_id, out.lease_id) for out in evaluation.outstanding]

    def _close(self, over: Callable[[Evaluation], bool]) -> None:
        for evaluation in [e for e in self._open if over(e)]:
            self._open.remove(evaluation)
            self._cancel(evaluation)
            if evaluation.count == 0:
                log.warning("evaluation %s ended without an answer", evaluation.eval_id)
                self._tally.count("eval_empty")
                continue
            self.finished.append(evaluation.result())
            for old in self.finished[:-DETAILED]:
                old.pop("sets", None)
            log.info("evaluation %s: %s", evaluation.eval_id, self.finished[-1])
