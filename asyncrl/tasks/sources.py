"""The task of task.name=sources: prompts from users' files and from procedures, held-out sets apart from training.

Knows sources as items; what files look like is data's, what procedures make is procedural's.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

import xxhash

from asyncrl.errors import TaskError
from asyncrl.sections.task import EvalSetSection, TaskSection
from asyncrl.tasks import chat, rewards
from asyncrl.tasks.base import Item, Task, prompt_id, read_stop_token_ids
from asyncrl.tasks.data import load
from asyncrl.tasks.data.layouts import Wants
from asyncrl.tasks.encode import SPECIAL, UNWRITABLE, Encoder
from asyncrl.tasks.identity import bytes_of, digest_of, same
from asyncrl.tasks.names import names_of
from asyncrl.tasks.overlap import keep_apart
from asyncrl.tasks.source import Source
from asyncrl.types import Prompt

log = logging.getLogger(__name__)

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


def build(task: TaskSection, tokenizer_dir: str | Path) -> Task:
    """Prompts of the task; see `asyncrl.tasks.build` for the errors."""
    encoder = Encoder(tokenizer_dir, task.max_prompt_tokens)
    train, held_out = _sources(task, "train"), _sources(task, "eval")
    for source in (*held_out, *train):
        _read(source, task, source in held_out)
    keep_apart(train, held_out, whole=task.environment is not None)
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


def check(task: TaskSection, limit_s: float = math.inf) -> None:
    """What can be seen of the sources before any process starts. Raises TaskError that names the key.

    limit_s: run.start_timeout_s, within which procedures must have made their items.
    """
    for source in (*_sources(task, "train"), *_sources(task, "eval")):
        if source.section.verifier is not None:
            _known_verifier(source, task)
        if source.section.path is not None:
            load.check(source.section, source.key, _wants(task))
        else:
            from asyncrl.tasks import procedural

            procedural.check(source.section.procedural or "", source.section.options, source.key)
    _check_time(task, limit_s)


def _check_time(task: TaskSection, limit_s: float) -> None:
    """Refuse sizes of slow procedures that replay could not make before the others stop waiting for it."""
    from asyncrl.tasks.procedural.cost import item_s

    costs: list[tuple[float, float, Source]] = []
    for source in (*_sources(task, "train"), *_sources(task, "eval")):
        if (name := source.section.procedural) is not None:
            each_s = item_s(name, source.section.options, isinstance(source.section, EvalSetSection))
            costs.append((each_s * (source.section.size or PROCEDURAL_SIZE), each_s, source))
    total_s = sum(cost for cost, *_ in costs)
    if total_s <= limit_s:
        return
    cost, each_s, source = max(costs, key=lambda c: c[0])
    size, default = source.section.size or PROCEDURAL_SIZE, "" if source.section.size else ", the default,"
    fits = int((limit_s - (total_s - cost)) / each_s)
    smaller = f"set {source.key}.size <= {fits}" if fits >= 1 else f"set a smaller {source.key}.size"
    others = f" ({total_s:.0f} s with all other sources)" if total_s > cost else ""
    raise TaskError(
        f"{source.key}.size={size}{default} takes about {cost:.0f} s{others} to make from {source.section.procedural}, "
        f"longer than run.start_timeout_s={limit_s:g}, within which replay must be ready; {smaller}, or "
        f"run.start_timeout_s={math.ceil(1.5 * total_s / 10) * 10}"
    )


def longest_prompt(task: TaskSection, tokenizer_dir: str | Path) -> int:
    """Bound on the tokens of a prompt: those with more are left out. Raises TaskError for a chat template."""
    _teller(task, (*_sources(task, "train"), *_sources(task, "eval")), tokenizer_dir)
    return task.max_prompt_tokens


def _sources(task: TaskSection, part: str) -> list[Source]:
    sections = getattr(task, part)
    own = next((f"task.{k}={v}" for k in ("environment", "reward") if (v := getattr(task, k)) is not None), "")
    return [
        Source(f"task.{part}[{i}]", n, s, own=own)
        for i, (n, s) in enumerate(zip(names_of(sections), sections, strict=True))
    ]


def _wants(task: TaskSection) -> Wants:
    """A user's reward or environment may do without a gold answer, and read whatever the file has."""
    own = task.reward is not None or task.environment is not None
    return Wants(answers=not own, columns=own, tasks=task.environment is not None)


def _known_verifier(source: Source, task: TaskSection) -> None:
    name, setting = source.section.verifier or "", f"{source.key}.verifier={source.section.verifier!r}"
    if name == rewards.USER and task.reward is None:
        raise TaskError(f"{setting} is task.reward, which is not set; set task.reward=package.module:function")
    known = sorted({*rewards.VERIFIERS, *rewards.LAZY, *((rewards.USER,) if task.reward is not None else ())})
    if name not in known:
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
        raise TaskError(f"{setting} is no verifier; {hint} (docs/verifiers.md)")


def _teller(task: TaskSection, sources: Sequence[Source], tokenizer_dir: str | Path) -> chat.Teller:
    system = task.system_prompt is not None or any(s.section.system_prompt is not None for s in sources)
    return chat.teller(task.chat, tokenizer_dir, system)


def _read(source: Source, task: TaskSection, held_out: bool) -> None:
    """The items of a source, and the check that its gold answers earn their reward."""
    section = source.section
    if section.path is not None:
        log.info("%s %s: reading %r", source.key, source.name, section.path)
        source.items, source.counts = load.load(section, source.key, _wants(task))
    else:
        from asyncrl.tasks import gate, procedural

        name, size = section.procedural or "", section.size or PROCEDURAL_SIZE
        log.info("%s %s: making %d items of %s", source.key, source.name, size, name)
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


def _write(source: Source, task: TaskSection, encoder: Encoder, tell: chat.Teller, taken: set[bytes]) -> None:
    """Prompts of a source: at most `size`, none of a text that is taken already."""
    limit = source.section.size or len(source.items)
    chosen: list[tuple[int, Prompt]] = []
    walked = _walk(source, task)
    own: set[bytes] = set()
    while len(chosen) < limit and (chunk := list(islice(walked, _CHUNK))):
        texts = []
        for index, item in chunk:
            if encoder.names_special(content for _, content in item.messages or (("user", item.text),)):
                source.leave_out(item, SPECIAL)
            else:
                texts.append((index, item, tell(_messages(source, task, item))))
        for (index, item, text), ids in zip(texts, encoder.encode([t for *_, t in texts]), strict=True):
            said = same(text, item, task.environment is not None)
            digest = digest_of(said)
            if isinstance(ids, str):
                source.leave_out(item, ids)
            elif digest in taken:
                source.leave_out(item, "duplicate" if digest in own else "elsewhere")
            elif len(chosen) < limit:
                own.add(digest)
                taken.add(digest)
                p = Prompt(prompt_id(source.name, said), ids, text, item.answer, item.verifier, source.name, item.extra)
                chosen.append((index, p))
            else:
                source.counts["unused"] += 1
    source.counts["unused"] += sum(1 for _ in walked)
    source.prompts = [prompt for _, prompt in sorted(chosen, key=lambda pair: pair[0])]
    source.items = []
    _refuse_poor(source, task)


def _walk(source: Source, task: TaskSection) -> Iterator[tuple[int, Item]]:
    """(place, item): as they come, or with a size by a hash of text and seed, so that no order of rows matters."""
    numbered = list(enumerate(source.items))
    whole = task.environment is not None
    if source.section.size is not None:
        numbered.sort(key=lambda n: xxhash.xxh3_64_intdigest(bytes_of(same(n[1].text, n[1], whole)), task.seed))
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
