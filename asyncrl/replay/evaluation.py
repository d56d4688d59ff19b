"""One held-out evaluation at a pinned version: which answers are out, in, or still to be leased. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from asyncrl.tasks.estimates import Answer, summary
from asyncrl.tasks.held_out import Asked, set_of
from asyncrl.types import Prompt, Version
from asyncrl.wire import EvalAnswer, LeaseMsg, prompt_to_msg


class Key(NamedTuple):
    """One response of an evaluation: prompt, sample number (0 for greedy), greedy."""

    prompt: int
    sample: int
    greedy: bool


class Out(NamedTuple):
    """A leased response."""

    lease_id: str
    generator_id: str
    expires: float


class Evaluation:
    """All responses come from one version: when it cannot be had any more, the newest one starts over.

    asked: of the prompts of every set, by its name. Ids of prompts differ, also between sets. names_answers: as
    `estimates.summary` takes it.
    """

    def __init__(
        self,
        eval_id: str,
        target: Version,
        prompts: Sequence[Prompt],
        asked: Mapping[str, Asked],
        names_answers: bool = True,
    ) -> None:
        self._names_answers = names_answers
        self.eval_id, self.target, self.requested = eval_id, target, target
        self.started: float | None = None
        self._prompts, self._asked = prompts, asked
        self._index = {p.prompt_id: i for i, p in enumerate(prompts)}
        of = [asked[set_of(p)] for p in prompts]
        self._keys = [Key(i, s, False) for i, a in enumerate(of) for s in range(a.samples)]
        self._keys += [Key(i, 0, True) for i, a in enumerate(of) if a.greedy]
        self._pending = dict.fromkeys(self._keys)
        self._out: dict[Key, Out] = {}
        self._answers: dict[Key, EvalAnswer] = {}
        self._attempts: Counter[Key] = Counter()

    @property
    def complete(self) -> bool:
        """True when nothing is left to ask for or to wait for."""
        return not self._pending and not self._out

    @property
    def count(self) -> int:
        """Answers so far."""
        return len(self._answers)

    @property
    def outstanding(self) -> list[Out]:
        """What generators are sampling now."""
        return list(self._out.values())

    def lease(self, generator_id: str, rows: int, now: float, timeout_s: float) -> Iterator[LeaseMsg]:
        """Up to `rows` responses to sample. The first lease starts the evaluation's time."""
        for key in list(self._pending)[:rows]:
            del self._pending[key]
            self._attempts[key] += 1
            prompt = self._prompts[key.prompt]
            group_id = f"eval/{self.eval_id}/{prompt.prompt_id}/{'greedy' if key.greedy else key.sample}"
            lease_id = f"{group_id}#{self._attempts[key]}"
            self._out[key] = Out(lease_id, generator_id, now + timeout_s)
            self.started = now if self.started is None else self.started
            yield LeaseMsg(
                lease_id,
                group_id,
                self._attempts[key],
                prompt_to_msg(prompt),
                timeout_s,
                self.eval_id,
                key.greedy,
                key.sample,
            )

    def answer(self, answer: EvalAnswer) -> bool:
        """Record one answer, the first per response. False when it was not asked for (any more)."""
        key = self._key(answer)
        if key is None or key in self._answers:
            return False
        self._out.pop(key, None)
        self._pending.pop(key, None)
        self._answers[key] = answer
        return True

    def refuse(self, answer: EvalAnswer, max_attempts: int) -> None:
        """An answer of another version: ask again, at most max_attempts times."""
        key = self._key(answer)
        if key is not None and key in self._out:
            self._again(key, max_attempts)

    def release(self, max_attempts: int, *, generator_id: str = "", lease_id: str = "", now: float = -1.0) -> int:
        """Ask again for what a generator or lease will not deliver, or what expired by `now`."""
        gone = [
            key
            for key, out in self._out.items()
            if out.generator_id == generator_id or out.lease_id == lease_id or out.expires <= now
        ]
        for key in gone:
            self._again(key, max_attempts)
        return len(gone)

    def restart(self, target: Version) -> None:
        """Forget every answer and ask again, of another version."""
        self.target = target
        self._pending = dict.fromkeys(self._keys)
        self._out, self._answers = {}, {}
        self._attempts = Counter()

    def result(self) -> dict[str, Any]:
        """Means over the answers of all sets, and under `sets` what the answers of each say (tasks.estimates.summary).

        failed, also by set: responses that were asked for and gave no answer, which count in no mean.
        Lengths and truncation are those of the sampled ones, if there are any.
        """
        sampled = [a for k, a in self._answers.items() if not k.greedy]
        greedy = [a for k, a in self._answers.items() if k.greedy]
        shown = sampled or greedy
        out: dict[str, Any] = {
            "eval_id": self.eval_id,
            "label": str(self.target),
            "requested": str(self.requested),
            "status": "complete" if len(self._answers) == len(self._keys) else "cut short",
            "version": self.target.update,
            "epoch": self.target.epoch,
            "count": len(self._answers),
            "failed": len(self._keys) - len(self._answers),
            "response_length": _mean([float(a.length) for a in shown]),
            "truncated_fraction": _mean([float(a.finish_reason == "length") for a in shown]),
        }
        if sampled:
            out["sampled_accuracy"] = _mean([a.reward for a in sampled])
        if greedy:
            out["greedy_accuracy"] = _mean([a.reward for a in greedy])
        return out | {"sets": self._sets()}

    def _sets(self) -> dict[str, dict[str, float]]:
        by_set: dict[str, list[Answer]] = {set_of(p): [] for p in self._prompts}
        for key in self._keys:
            if (a := self._answers.get(key)) is not None:
                by_set[set_of(self._prompts[key.prompt])].append(
                    Answer(
                        a.prompt_id, a.sample, a.greedy, a.reward, a.length, a.finish_reason == "length", a.extracted,
                        a.parts,
                    )
                )  # fmt: skip
        wanted = Counter(set_of(self._prompts[key.prompt]) for key in self._keys)
        return {
            name: summary(answers, self._asked[name].samples, self._names_answers)
            | {"failed": float(wanted[name] - len(answers))}
            for name, answers in by_set.items()
        }

    def _again(self, key: Key, max_attempts: int) -> None:
        del self._out[key]
        if self._attempts[key] < max_attempts:
            self._pending[key] = None

    def _key(self, answer: EvalAnswer) -> Key | None:
        index = self._index.get(answer.prompt_id)
        key = Key(index if index is not None else -1, answer.sample, answer.greedy)
        return key if key in self._out or key in self._pending else None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
