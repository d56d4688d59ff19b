"""Token ids to text, for rewards only: decoded text is never encoded again.

Uses the `tokenizers` library on <folder>/tokenizer.json; knows nothing of chat templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from asyncrl.errors import TaskError

TokenIds = NDArray[np.integer] | Sequence[int]


def load_tokenizer(tokenizer_dir: str | Path) -> Tokenizer:
    """Read <folder>/tokenizer.json, without padding or truncation. Raises TaskError naming the file."""
    file = Path(tokenizer_dir) / "tokenizer.json"
    if not file.is_file():
        raise TaskError(f"{str(file)!r} does not exist; model.path must be a folder with a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as exc:  # the library raises a bare Exception for every failure
        raise TaskError(f"{str(file)!r} is not a tokenizer: {exc}") from exc
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


class Decoder:
    """Decodes responses of one model. Special tokens (the stop token among them) leave no text."""

    def __init__(self, tokenizer_dir: str | Path) -> None:
        """Read <folder>/tokenizer.json. Raises TaskError naming the file."""
        self._tokenizer = load_tokenizer(tokenizer_dir)

    def decode(self, token_ids: TokenIds) -> str:
        """Text of one response, ids [T]."""
        return self._tokenizer.decode(_plain(token_ids), skip_special_tokens=True)

    def decode_many(self, responses: Sequence[TokenIds]) -> list[str]:
        """Texts of several responses, in order."""
        return self._tokenizer.decode_batch([_plain(ids) for ids in responses], skip_special_tokens=True)


def _plain(token_ids: TokenIds) -> list[int]:
    return token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(token_ids)
