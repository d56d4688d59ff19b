"""Token ids to text, token by token, and text to what a terminal or a page may show.

A character may take several tokens (bytes of UTF-8): those make one piece. Knows the `tokenizers` library through
asyncrl.tasks.text only.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from asyncrl.tasks.text import load_tokenizer

LONGEST = 8
"""Tokens that are put together for one character; what is none then is shown as it is."""

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer gives for bytes that are no character, or not yet."""

_OPEN, _CLOSE = "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}", "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}"
MARKS = (_OPEN, _CLOSE)
"""Around what the policy did not sample; in a text they are escaped."""


class Piece(NamedTuple):
    """Text of the tokens [start, end) of a sequence."""

    text: str
    start: int
    end: int


class Pieces:
    """Decodes with the tokenizer of a model folder, special tokens included. Raises TaskError naming the file."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = load_tokenizer(folder)

    def text(self, ids: Sequence[int]) -> str:
        """Text of a whole sequence."""
        return "".join(piece.text for piece in self.of(ids))

    def of(self, ids: Sequence[int]) -> list[Piece]:
        """Pieces of a sequence, in order; every token is in exactly one."""
        out: list[Piece] = []
        before = 0  # the piece before gives the context: some tokenizers drop a space at a beginning
        start = 0
        for end in range(1, len(ids) + 1):
            prefix, whole = self._decode(ids[before:start]), self._decode(ids[before:end])
            text = whole[len(prefix) :] if whole.startswith(prefix) else self._decode(ids[start:end])
            if text.endswith(BROKEN) and end - start < LONGEST and end < len(ids):
                continue
            out.append(Piece(text or self._silent(ids[start:end]), start, end))
            before, start = start, end
        return out

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def _silent(self, ids: Sequence[int]) -> str:
        """Tokens that leave no text: those that the tokenizer does not know."""
        return "".join(f"<token {i}>" for i in ids if self._tokenizer.id_to_token(i) is None)


class Unknown(Pieces):
    """Without a tokenizer: the ids."""

    def __init__(self) -> None:
        pass

    def of(self, ids: Sequence[int]) -> list[Piece]:
        """As `Pieces.of`."""
        return [Piece(f"<{i}>", n, n + 1) for n, i in enumerate(ids)]


def visible(text: str) -> str:
    """The text without what steers a terminal or turns the direction of a line: such characters are written as their
    codes. Line ends stay; tabs become four spaces."""
    return "".join(c if c.isascii() and c.isprintable() else _shown(c) for c in text)


def _shown(c: str) -> str:
    if c == "\n":
        return c
    if c == "\t":
        return "    "
    # Cc controls, Cf formats (bidi overrides, zero widths), Cs surrogates, Co private, Cn none, Zl and Zp line ends.
    if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") or c in MARKS:
        return f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}" if ord(c) < 65536 else f"\\U{ord(c):08x}"
    return c
