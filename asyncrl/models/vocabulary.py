"""Whether two model folders speak of the same tokens, by their config.json and tokenizer.json. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.models.describe import describe


def vocabulary_difference(path: str | Path, other: str | Path) -> str:
    """In words what the vocabulary of `other` has that of `path` has not, "" when an id is the same token in both.

    An id that only one of the two tokenizers names does not count: families leave rows of the matrix unused. Folders of
    which one has no tokenizer.json are compared by their size alone. Raises ConfigError naming a file that cannot be
    read.
    """
    ours, theirs = describe(path).vocab_size, describe(other).vocab_size
    if ours != theirs:
        return f"{theirs} tokens against {ours}"
    files = [Path(folder) / "tokenizer.json" for folder in (path, other)]
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return ""
    mine, its = map(_tokens, files)
    wrong = [i for i in sorted(mine.keys() & its.keys()) if mine[i] != its[i]]
    if not wrong:
        return ""
    i = wrong[0]
    return f"id {i} is {its[i]!r} against {mine[i]!r}, and so on for {len(wrong)} of {len(mine)} ids"


def _tokens(file: Path) -> dict[int, str]:
    """Token by id of a tokenizer.json."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        vocab: Any = content["model"]["vocab"]
        if isinstance(vocab, dict):
            found = {int(i): str(token) for token, i in vocab.items()}
        else:  # unigram: pairs of token and score
            found = {i: str(token) for i, (token, *_) in enumerate(vocab)}
        return found | {int(added["id"]): str(added["content"]) for added in content.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"{file} cannot be read: {exc!r}; copy the folder again") from exc
