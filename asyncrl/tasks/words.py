"""Words that messages about users' files and code share. Pure."""

from __future__ import annotations


def with_article(word: str) -> str:
    """`a list`, `an int`."""
    return f"{'an' if word[:1].lower() in 'aeio' else 'a'} {word}"


def memory_hint(exc: BaseException) -> str:
    """What to say besides the error of an import, when it looks like a lack of memory; else ""."""
    text = str(exc).lower()
    if isinstance(exc, MemoryError) or "cannot allocate" in text or "map segment" in text:
        return " (it needs more than generator.reward_memory_bytes; raise that, or import less)"
    return ""
