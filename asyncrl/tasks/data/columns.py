"""Values in a row of a file: columns by name in any case, fields of columns, and texts out of whatever type they have.

Knows rows as plain mappings; no file and no layout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asyncrl.errors import TaskError

Messages = tuple[tuple[str, str], ...]
"""(role, content) of each message of a conversation."""

Values = Mapping[str, Any]


def find(name: str, columns: Iterable[str]) -> str | None:
    """The column of that name: exactly, else in any case; None without one."""
    known = list(columns)
    if name in known:
        return name
    return next((c for c in known if c.lower() == name.lower()), None)


def value(values: Values, path: str) -> Any:
    """What lies at a column, or at field b of column a for `a.b`; None where there is nothing.

    A column whose own name has a dot is found first. A field is looked up in a struct and in a text that is JSON.
    """
    found = find(path, values)
    if found is not None:
        return values[found]
    head, dot, rest = path.partition(".")
    found = find(head, values)
    if not dot or found is None:
        return None
    inner = values[found]
    if isinstance(inner, str):
        inner = parsed(inner)
    return value(inner, rest) if isinstance(inner, Mapping) else None


def parsed(text: str) -> Any:
    """The value of a text that is JSON, None for another one."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def plain(cell: Any) -> Any:
    """An array of numpy's as lists, inside too; anything else as it is."""
    if hasattr(cell, "tolist"):
        cell = cell.tolist()
    return [plain(v) for v in cell] if isinstance(cell, list | tuple) else cell


def text_of(cell: Any, what: str) -> str:
    """A text, or a number as text: 33 and 33.0 give "33", "033" stays. what: the place, for the error.

    Raises TaskError for nothing, an empty text, a truth value, and whatever is neither text nor number.
    """
    cell = plain(cell)
    if isinstance(cell, list) and len(cell) == 1:
        cell = cell[0]
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        raise TaskError(f"{what} is missing (null)")
    if isinstance(cell, str):
        if not cell.strip():
            raise TaskError(f"{what} is empty")
        if not _is_unicode(cell):
            raise TaskError(f"{what} holds half of a surrogate pair, which is no character; repair the text")
        return cell
    if isinstance(cell, bool) or not isinstance(cell, int | float):
        raise TaskError(f"{what} is {_kind(cell)}, where a text or a number belongs")
    if isinstance(cell, float) and cell.is_integer() and abs(cell) < 2**53:
        return str(int(cell))
    return str(cell)


def prompt_of(cell: Any, what: str) -> str | Messages:
    """A question, or the messages of a conversation that ends with the user's. what: the place, for errors.

    Read are a text, a list of {role, content}, the same as JSON, and arrays of them. Raises TaskError.
    """
    cell = plain(cell)
    if isinstance(cell, str):
        found = parsed(cell)
        if not (isinstance(found, list) and found and all(_is_message(m) for m in found)):
            return text_of(cell, what)
        cell = found
    if cell is None or isinstance(cell, int | float | Mapping):
        raise TaskError(
            f"{what} is missing (null)"
            if cell is None
            else f"{what} is {_kind(cell)}, where a text or a list of {{role, content}} belongs"
        )
    if not isinstance(cell, Sequence) or not cell:
        raise TaskError(f"{what} is {_kind(cell)}, where a text or a list of {{role, content}} belongs")
    messages = tuple(_message(m, f"{what}, message {i + 1},") for i, m in enumerate(cell))
    if messages[-1][0] != "user":
        raise TaskError(f"{what} ends with a message of {messages[-1][0]!r}; the last one must be the user's")
    return messages


def _is_message(cell: Any) -> bool:
    return isinstance(cell, Mapping) and "role" in cell and "content" in cell


def _message(cell: Any, what: str) -> tuple[str, str]:
    if not _is_message(cell):
        raise TaskError(f"{what} is {_kind(cell)}, where {{role, content}} belongs")
    role, content = cell["role"], plain(cell["content"])
    if role not in ("system", "user", "assistant"):
        raise TaskError(f"{what} has the role {role!r}; known are system, user and assistant")
    if isinstance(content, list):  # parts, as of a chat API
        if not all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
            raise TaskError(f"{what} has parts that are no text")
        content = "".join(p["text"] for p in content)
    return role, text_of(content, f"{what} its content")


def as_json(cell: Any) -> Any:
    """A cell as JSON can hold it: what it cannot becomes text, NaN nothing."""
    cell = plain(cell)
    if isinstance(cell, Mapping):
        return {as_json(str(k)): as_json(v) for k, v in cell.items()}
    if isinstance(cell, list):
        return [as_json(v) for v in cell]
    if isinstance(cell, float):
        return cell if math.isfinite(cell) else None
    if isinstance(cell, str):
        return cell if _is_unicode(cell) else cell.encode("utf-8", "replace").decode()
    return cell if cell is None or isinstance(cell, int) else str(cell)


def _is_unicode(text: str) -> bool:
    """False for half of a surrogate pair, which JSON can hold and no encoding can write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(cell: Any) -> str:
    shown = repr(cell)
    return f"{shown if len(shown) <= 60 else shown[:57] + '...'} ({type(cell).__name__})"
