"""What a task is, and the steps every task shares: texts to prompts, stop tokens, the overlap check.

Knows nothing of where items come from or how answers are scored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from tokenizers import Tokenizer

from asyncrl.errors import TaskError
from asyncrl.tasks.text import load_tokenizer
from asyncrl.types import Prompt


class Item(NamedTuple):
    """One problem as text: the question and its gold answer.

    verifier: name of the one that scores it, "" for that of its source. extra: JSON of what else a reward or an
    environment reads. messages: (role, content) of the conversation that a file gives instead of a question; text is
    then the last message of the user. whole: the text is a whole instruction, around which no template of the task
    goes. where: the file and the row that it comes from, "" of a procedure's.
    """

    text: str
    answer: str
    verifier: str = ""
    extra: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    whole: bool = False
    where: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """Built prompts of one task; `train` and `eval` share no text. stop_token_ids end a response.

    counts: rows that were left out while data was read, by `<data source>/<reason>` (duplicate, overlong, ...), of
    held-out sets by `eval/<set>/<reason>`. weights: share of each data source in the training prompts; none for every
    prompt as often as the next. notes: a line to log about each source.
    """

    name: str
    train: Sequence[Prompt]
    eval: Sequence[Prompt]
    stop_token_ids: tuple[int, ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def make_prompts(
    source: str,
    items: Sequence[Item],
    tokenizer_dir: str | Path,
    write: Callable[[str], str] = str,
    data_source: str = "",
) -> tuple[Prompt, ...]:
    """Items to prompts, in order. Ids depend on source and text only, never on the position.

    write: question to the text that is tokenized and kept (asyncrl.tasks.chat). token_ids: int32 [P], no special
    token is added to what it gives. Raises TaskError for a text that the tokenizer cannot write (an unknown
    character, or one that silently vanishes) and for a question that contains a special token.
    """
    tokenizer = load_tokenizer(tokenizer_dir)
    _refuse_special_tokens(source, items, tokenizer)
    texts = [write(item.text) for item in items]
    try:
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    except Exception as exc:  # the library raises a bare Exception for every failure
        raise TaskError(f"the tokenizer in {str(tokenizer_dir)!r} cannot encode {source} prompts: {exc}") from exc
    ids = [encoding.ids for encoding in encodings]
    for text, back in zip(texts, tokenizer.decode_batch(ids, skip_special_tokens=False), strict=True):
        if "".join(back.split()) != "".join(text.split()):
            raise TaskError(
                f"the tokenizer in {str(tokenizer_dir)!r} cannot write {source} prompts: "
                f"{text!r} comes back as {back!r}"
            )
    return tuple(
        Prompt(prompt_id(source, text), np.asarray(row, np.int32), text, item.answer, source, data_source)
        for item, text, row in zip(items, texts, ids, strict=True)
    )


def _refuse_special_tokens(source: str, items: Sequence[Item], tokenizer: Tokenizer) -> None:
    """The tokenizer would read their text as the tokens themselves, and a question could end its own message."""
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    for item in items:
        for token in special:
            if token in item.text:
                raise TaskError(f"{source} question {item.text[:60]!r} contains the special token {token!r}")


def prompt_id(source: str, text: str) -> str:
    """Stable id of a prompt: `<source>-<xxh3-64 of the text>`."""
    return f"{source}-{xxhash.xxh3_64_hexdigest(text.encode())}"


def read_stop_token_ids(tokenizer_dir: str | Path) -> tuple[int, ...]:
    """End-of-sequence ids of a model folder, from generation_config.json, else config.json.

    Both a number and a list of numbers are read. Raises TaskError when neither file names one.
    """
    for name in ("generation_config.json", "config.json"):
        file = Path(tokenizer_dir) / name
        if not file.is_file():
            continue
        try:
            value = json.loads(file.read_text()).get("eos_token_id")
        except (ValueError, AttributeError) as exc:
            raise TaskError(f"{str(file)!r} is not a JSON object: {exc}") from exc
        ids = value if isinstance(value, list) else [value]
        if ids and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            return tuple(dict.fromkeys(ids))
    raise TaskError(
        f"no eos_token_id in generation_config.json or config.json of {str(tokenizer_dir)!r}: "
        "responses would never stop; set eos_token_id in config.json"
    )


def check_disjoint(name: str, train: Sequence[Item], held_out: Sequence[Item]) -> None:
    """Raise TaskError if a held-out text is also a training text, or if a set repeats a text."""
    for part, items in (("training", train), ("held-out", held_out)):
        repeats = len(items) - len({item.text for item in items})
        if repeats:
            raise TaskError(f"task {name!r}: {repeats} of {len(items)} {part} prompts repeat another one")
    shared = {item.text for item in train} & {item.text for item in held_out}
    if shared:
        raise TaskError(
            f"task {name!r}: {len(shared)} held-out prompts are also training prompts, for example {min(shared)!r}; "
            "held-out accuracy would measure memory (keys task.train_size, task.eval_size, task.seed)"
        )
