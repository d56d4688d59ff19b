"""One source of prompts while they are made: its items, its prompts, what was left out, and the line that says so."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from asyncrl.sections.task import SourceSection
from asyncrl.tasks import rewards
from asyncrl.tasks.base import Item
from asyncrl.types import Prompt


@dataclass(eq=False)
class Source:
    """One source while its prompts are made.

    firsts: the first row that was left out, by reason. own: the user's code that scores it, as it is configured.
    """

    key: str
    name: str
    section: SourceSection
    counts: Counter[str] = field(default_factory=Counter)
    firsts: dict[str, str] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    own: str = ""

    @property
    def origin(self) -> str:
        """What the user wrote."""
        return self.section.path or self.section.procedural or self.name

    def leave_out(self, item: Item, reason: str) -> None:
        """Count an item that is not used."""
        self.counts[reason] += 1
        self.firsts.setdefault(reason, item.where or repr(item.text[:60]))

    def left_out(self) -> list[tuple[str, int]]:
        """(reason, rows) of what is not used; with the prompts they make up the rows."""
        return [(k, v) for k, v in sorted(self.counts.items()) if v and k != "rows"]

    def note(self) -> str:
        """One line: rows, prompts, what was left out and where it was first seen."""
        out = [f"{k} {v}" + (f" (first: {self.firsts[k]})" if k in self.firsts else "") for k, v in self.left_out()]
        longest = max((len(p.token_ids) for p in self.prompts), default=0)
        made = (
            f"{self.key} {self.name}: {len(self.prompts)} prompts of up to {longest} tokens from "
            f"{self.counts['rows']} rows of {self.origin!r}"
        )
        return made + (f"; left out: {', '.join(out)}" if out else "") + self._scoring()

    def _scoring(self) -> str:
        """What its responses must hold, of each verifier: an answer elsewhere earns nothing."""
        if self.own:
            return f"; scored by {self.own}"
        used = dict.fromkeys(p.source for p in self.prompts)
        return "".join(f"; scored by {v}: {rewards.LOOKS_FOR.get(v, 'docs/verifiers.md')}" for v in used)
