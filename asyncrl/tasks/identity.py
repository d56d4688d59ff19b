"""What makes two items the same task: their text, and for an environment the answer and the extra besides. Pure."""

from __future__ import annotations

import json
from typing import Any

import xxhash

from asyncrl.tasks.base import Item

COUNTERS = frozenset({"id", "unique_id", "problem_idx", "index"})
"""Fields of an extra that number the rows of a file; they make no task another one."""


def besides(item: Item) -> str:
    """What an environment is made of besides the text: the answer, and the extra without numbers of rows."""
    extra = json.loads(item.extra) if item.extra else {}
    return json.dumps([item.answer.strip(), _without_counters(extra)], sort_keys=True, ensure_ascii=False)


def same(text: str, item: Item, whole: bool) -> str:
    """What two items share when they are the same task: a text, with `whole` what else an environment is made of."""
    return f"{text}\0{besides(item)}" if whole else text


def digest_of(text: str) -> bytes:
    """128 bits of it."""
    return bytes(xxhash.xxh3_128_digest(bytes_of(text)))


def bytes_of(text: str) -> bytes:
    """Of any text, one with half of a surrogate pair, too."""
    return text.encode("utf-8", "surrogatepass")


def _without_counters(extra: Any) -> Any:
    if not isinstance(extra, dict):
        return extra
    kept = {k: v for k, v in extra.items() if k.lower() not in COUNTERS}
    return {k: _without_counters(v) if k.lower() == "extra_info" else v for k, v in kept.items()}
