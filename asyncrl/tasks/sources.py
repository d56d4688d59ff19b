"""The task of task.name=sources: prompts from users' files and from procedures, held-out sets apart from training.

Knows sources as items; what files look like is data's, what procedures make is procedural's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import xxhash

from asyncrl.errors import TaskError
from asyncrl.sections.task import SourceSection, TaskSection
from asyncrl.tasks import chat, rewards
from asyncrl.tasks.base import Item, Task, prompt_id, read_stop_token_ids
from asyncrl.tasks.data import load
from asyncrl.tasks.data.layouts import Wants
from asyncrl.tasks.data.wrappers import bare
from asyncrl.tasks.encode import SPECIAL, UNWRITABLE, Encoder
from asyncrl.tasks.names import names_of
from asyncrl.types import Prompt

PROCEDURAL_SIZE = 1000
"""Items of a procedure without size."""

_CHUNK = 512
"""Texts that are tokenized at once."""
_GOLDS = 4
"""Items of each source and verifier whose gold answers must earn their reward."""
_GATED = 8
"""Items of a procedure on which its verifier must pass the gate."""
_POOR_SHARE = 0.1
"""With more of the texts the tokenizer is the wrong one for the file, with more of the answers the verifier is."""
_UNPAID = "unpaid"


@dataclass(eq=False)
class Source:
    """One source while its prompts are made. firsts: the first row that was left out, by reason."""

    key: str
    name: str
    section: SourceSection
    counts: Counter[str] = field(default_factory=Counter)
    firsts: dict[str, str] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)

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
        return (
            f"{self.key} {self.name}: {len(self.prompts)} prompts of up to {longest} tokens from "
            f"{self.counts['rows']} rows of {self.origin!r}" + (f"; left out: {', '.join(out)}" if out else "")
        )


def build(task: TaskSection, tokenizer_dir: str | Path) -> Task:
    """Prompts of the task; see `asyncrl.tasks.build` for the errors."""
    encoder = Encoder(tokenizer_dir, task.max_prompt_tokens)
    train, held_out = _sources(task, "train"), _sources(task, "eval")
    for source in (*held_out, *train):
        _read(source, task, source in held_out)
    known = _bare_texts(held_out)
    for source in train:
        _part(source, known)
    tell = _teller(task, (*train, *held_out), tokenizer_dir)
    taken: set[bytes] = set()
    for source in train:
        _write(source, task, encoder, tell, taken)
    for source in held_out:
        _write(source, task, encoder, tell, set())
    counts = {f"{s.name}/{k}": v for s in train for k, v in s.left_out()}
    counts |= {f"eval/{s.name}/{k}": v for s in held_out for k, v in s.left_out()}
    return Task(
        name="sources",
        train=tuple(p for s in train for p in s.prompts),
        eval=tuple(p for s in held_out for p in s.prompts),
        stop_token_ids=read_stop_token_ids(tokenizer_dir),
        counts=counts,
        weights={s.name: s.section.weight for s in train},
        notes=tuple(s.note() for s in (*train, *held_out)),
    )


def check(task: TaskSection) -> None:
    """What can be seen of the sources before any process starts. Raises TaskError that names the key."""
    for source in (*_sources(task, "train"), *_sources(task, "eval")):
        if source.section.verifier is not None:
            _known_verifier(source, task)
        if source.section.path is not None:
            load.check(source.section, source.key, _wants(task))
        else:
            from asyncrl.tasks import procedural

            procedural.check(source.section.procedural or "", source.section.options, source.key)


def longest_prompt(task: TaskSection, tokenizer_dir: str | Path) -> int:
    """Bound on the tokens of a prompt: those with more are left out. Raises TaskError for a chat template."""
    _teller(task, (*_sources(task, "train"), *_sources(task, "eval")), tokenizer_dir)
    return task.max_prompt_tokens


def _sources(task: TaskSection, part: str) -> list[Source]:
    sections = getattr(task, part)
    return [
        Source(f"task.{part}[{i}]", n, s) for i, (n, s) in enumerate(zip(names_of(sections), sections, strict=True))
    ]


def _wants(task: TaskSection) -> Wants:
    """A user's reward or environment may do without a gold answer, and read whatever the file has."""
    own = task.reward is not None or task.environment is not None
    return Wants(answers=not own, columns=own)


def _known_verifier(source: Source, task: TaskSection) -> None:
    try:
        if source.section.verifier != rewards.USER or task.reward is None:
            rewards.verifier(source.section.verifier or "")
    except TaskError as exc:
        raise TaskError(f"{source.key}.verifier={source.section.verifier!r}: {exc}") from exc


def _teller(task: TaskSection, sources: Sequence[Source], tokenizer_dir: str | Path) -> chat.Teller:
    system = task.system_prompt is not None or any(s.section.system_prompt is not None for s in sources)
    return chat.teller(task.chat, tokenizer_dir, system)


def _read(source: Source, task: TaskSection, held_out: bool) -> None:
    """The items of a source, and the check that its gold answers earn their reward."""
    section = source.section
    if section.path is not None:
        source.items, source.counts = load.load(section, source.key, _wants(task))
    else:
        from asyncrl.tasks import gate, procedural

        name, size = section.procedural or "", section.size or PROCEDURAL_SIZE
        source.items = procedural.items(name, section.options, size, task.seed, held_out, source.key)
        gate.check(name, source.items[:_GATED], source.key)
        source.counts["rows"] = len(source.items)
        if section.verifier is not None:
            source.items = [item._replace(verifier=section.verifier) for item in source.items]
    if task.reward is not None:
        source.items = [item._replace(verifier=rewards.USER) for item in source.items]
    elif task.environment is None:
        _check_golds(source)


def _check_golds(source: Source) -> None:
    """Leave out items whose own verifier does not pay for their gold answer: their reward would be 0 for ever.

    Refuses a source that begins with one, or that has many.
    """
    tried: Counter[str] = Counter()
    kept, first = [], ""
    for item in source.items:
        tried[item.verifier] += 1
        try:
            _score_gold(item)
        except TaskError as exc:
            source.leave_out(item, _UNPAID)
            first = first or f"{source.key}: {item.where or repr(item.text[:60])}: verifier {item.verifier!r} {exc}"
            if tried[item.verifier] <= _GOLDS or source.counts[_UNPAID] > _POOR_SHARE * len(source.items):
                raise TaskError(f"{first}; look at the answer column, or set {source.key}.verifier") from exc
        else:
            kept.append(item)
    source.items = kept


def _score_gold(item: Item) -> None:
    """Raise TaskError when the gold answer earns less than 1."""
    try:
        rewards.prepare(item.verifier)
        reward = rewards.score(item.verifier, rewards.verifier(item.verifier).gold(item.answer), item.answer)
    except Exception as exc:  # verifiers call foreign code
        raise TaskError(f"cannot use the answer {item.answer[:200]!r}: {exc}") from exc
    if reward != 1.0:
        raise TaskError(f"gives {reward} for the answer {item.answer[:200]!r} itself")


def _bare_texts(held_out: Sequence[Source]) -> dict[bytes, tuple[Source, Item]]:
    return {_digest(bare(item.text)): (source, item) for source in held_out for item in source.items}


def _part(source: Source, held_out: dict[bytes, tuple[Source, Item]]) -> None:
    """Refuse a training file that has held-out questions; leave them out of what a procedure makes."""
    shared = [(item, held_out[d]) for item in source.items if (d := _digest(bare(item.text))) in held_out]
    if not shared:
        return
    if source.section.procedural is not None:
        out = {item.text for item, _ in shared}
        for item, _ in shared:
            source.leave_out(item, "held_out")
        source.items = [item for item in source.items if item.text not in out]
        return
    item, (other, theirs) = shared[0]
    raise TaskError(
        f"{other.key} ({other.origin}) shares {len(shared)} of its questions with {source.key} ({source.origin}), for "
        f"example {bare(item.text)[:100]!r} ({theirs.where or other.origin} and {item.where}); held-out accuracy would "
        "measure memory: remove them from one of the files, or evaluate on another set"
    )


def _write(source: Source, task: TaskSection, encoder: Encoder, tell: chat.Teller, taken: set[bytes]) -> None:
    """Prompts of a source: at most `size`, none of a text that is taken already."""
    limit = source.section.size or len(source.items)
    chosen: list[tuple[int, Prompt]] = []
    walked = _walk(source, task.seed)
    own: set[bytes] = set()
    while len(chosen) < limit and (chunk := list(islice(walked, _CHUNK))):
        texts = []
        for index, item in chunk:
            if encoder.names_special(content for _, content in item.messages or (("user", item.text),)):
                source.leave_out(item, SPECIAL)
            else:
                texts.append((index, item, tell(_messages(source, task, item))))
        for (index, item, text), ids in zip(texts, encoder.encode([t for *_, t in texts]), strict=True):
            digest = _digest(text)
            if isinstance(ids, str):
                source.leave_out(item, ids)
            elif digest in taken:
                source.leave_out(item, "duplicate" if digest in own else "elsewhere")
            elif len(chosen) < limit:
                own.add(digest)
                taken.add(digest)
                p = Prompt(prompt_id(source.name, text), ids, text, item.answer, item.verifier, source.name, item.extra)
                chosen.append((index, p))
            else:
                source.counts["unused"] += 1
    source.counts["unused"] += sum(1 for _ in walked)
    source.prompts = [prompt for _, prompt in sorted(chosen, key=lambda pair: pair[0])]
    source.items = []
    _refuse_poor(source, task)


def _walk(source: Source, seed: int) -> Iterator[tuple[int, Item]]:
    """(place, item): as they come, or with a size by a hash of text and seed, so that no order of rows matters."""
    numbered = list(enumerate(source.items))
    if source.section.size is not None:
        numbered.sort(key=lambda pair: xxhash.xxh3_64_intdigest(_bytes(pair[1].text), seed))
    return iter(numbered)


def _messages(source: Source, task: TaskSection, item: Item) -> list[tuple[str, str]]:
    """What the model is told: the config's system message and template around what the file says."""
    section = source.section
    template = section.template or (chat.PLAIN if item.whole else task.template)
    *before, (role, _) = item.messages or (("user", item.text),)
    has_system = any(r == "system" for r, _ in before)
    system = section.system_prompt if section.system_prompt is not None or has_system else task.system_prompt
    if system is not None:
        before = [("system", system), *((r, c) for r, c in before if r != "system")]
    return [*before, (role, template.replace(chat.QUESTION, item.text))]


def _refuse_poor(source: Source, task: TaskSection) -> None:
    unwritable = source.counts[UNWRITABLE]
    tried = unwritable + len(source.prompts)
    if unwritable > _POOR_SHARE * tried:
        raise TaskError(
            f"{source.key} ({source.origin}): the tokenizer of model.path cannot write {unwritable} of {tried} "
            f"prompts, first {source.firsts[UNWRITABLE]}; choose a model whose tokenizer has its characters"
        )
    if not source.prompts:
        raise TaskError(
            f"no prompt is left of {source.note()}; raise task.max_prompt_tokens={task.max_prompt_tokens} if they are "
            "too long, or change the file"
        )


def _digest(text: str) -> bytes:
    return bytes(xxhash.xxh3_128_digest(_bytes(text)))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
