"""Texts of users to token ids: which ones a tokenizer can write, and which are too long. Knows no file and no chat."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import TaskError
from asyncrl.tasks.text import load_tokenizer

OVERLONG = "overlong"
UNWRITABLE = "unwritable"
SPECIAL = "special_token"


class Encoder:
    """One tokenizer and the length that a prompt may have, in tokens."""

    def __init__(self, tokenizer_dir: str | Path, max_tokens: int) -> None:
        """Raises TaskError for a folder without a tokenizer."""
        self._tokenizer = load_tokenizer(tokenizer_dir)
        self._max_tokens = max_tokens
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = [re.escape(token.content) for token in added if token.special and token.content]
        self._special = re.compile("|".join(special)) if special else None

    def names_special(self, texts: Iterable[str]) -> bool:
        """Whether one of the texts holds a special token, which could end its own message."""
        return self._special is not None and any(self._special.search(text) for text in texts)

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int32] | str]:
        """Token ids int32 [P] of each text, no special token added to what it says; or why it has none.

        OVERLONG: more tokens than allowed. UNWRITABLE: what the tokenizer writes is not the text, white space, case
        and accents aside.
        """
        ids = self._ids(texts)
        kept = {i: row for i, row in enumerate(ids) if row is not None and len(row) <= self._max_tokens}
        back = self._tokenizer.decode_batch(list(kept.values()), skip_special_tokens=False)
        same = {i for i, text in zip(kept, back, strict=True) if _same(text, texts[i])}
        out: list[NDArray[np.int32] | str] = []
        for i, row in enumerate(ids):
            if row is not None and len(row) > self._max_tokens:
                out.append(OVERLONG)
            else:
                out.append(np.asarray(row, np.int32) if row is not None and i in same else UNWRITABLE)
        return out

    def _ids(self, texts: Sequence[str]) -> list[list[int] | None]:
        try:
            return [*self._batch(texts)]
        except TaskError:  # find the ones that it cannot write
            return [self._one(text) for text in texts]

    def _one(self, text: str) -> list[int] | None:
        try:
            return self._batch([text])[0]
        except TaskError:
            return None

    def _batch(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            return [e.ids for e in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]
        except Exception as exc:  # the library raises a bare Exception for every failure
            raise TaskError(f"the tokenizer cannot encode: {exc}") from exc


def _same(a: str, b: str) -> bool:
    return a == b or _folded(a) == _folded(b)


def _folded(text: str) -> str:
    """Tokenizers may normalise: neither white space nor case nor accents count."""
    plain = unicodedata.normalize("NFKD", text)
    return "".join(c for c in plain if not c.isspace() and not unicodedata.combining(c)).casefold()
