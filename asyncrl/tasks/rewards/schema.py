"""The verifier `json_schema`: the gold answer is a JSON schema, and the response must hold a document that fits it.

Nothing of a schema is executed or fetched: a reference may only point into the schema itself.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from asyncrl.errors import TaskError
from asyncrl.tasks.rewards.base import Verdict, verdict

MAX_TRIES = 1000
"""Opening brackets, from the end, at which a document is looked for."""
MAX_CHARS = 1_000_000
"""Characters at the end of a response that are looked at."""


def score_schema(text: str, answer: str) -> Verdict:
    """1 if the last complete JSON object or list in the text fits the schema, else 0.

    A text that is one JSON value as a whole may also be a number, a text or null. Raises TaskError for a gold answer
    that is no schema, or one that refers to another document.
    """
    checker = _checker(answer)
    found, document = last_json(text)
    if not found:
        return Verdict(0.0)
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return verdict(bool(checker.is_valid(document)), canonical)


def last_json(text: str) -> tuple[bool, Any]:
    """(True, the last complete JSON object or list that no other one holds), or the text itself where it is a value;
    (False, None) without one."""
    text = text[-MAX_CHARS:].strip()
    try:
        return True, json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    decoder = json.JSONDecoder(parse_constant=_refuse)
    best: tuple[int, int, Any] | None = None
    at, tries = len(text), 0
    while tries < MAX_TRIES and (at := max(text.rfind("{", 0, at), text.rfind("[", 0, at))) >= 0:
        tries += 1
        try:
            document, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            continue
        # Going backwards, a later find either holds the one before it, or ends before it begins.
        if best is not None and end <= best[0]:
            break
        best = (at, end, document)
    return (True, best[2]) if best else (False, None)


def gold_document(answer: str) -> str:
    """A document that fits the schema, of its own const, default, enum or examples; "" when it names none."""
    schema = _parse(answer)
    for found in ([schema.get(k)] if k in schema else [] for k in ("const", "default")):
        if found:
            return json.dumps(found[0])
    listed = schema.get("examples") or schema.get("enum") or []
    return json.dumps(listed[0]) if listed else ""


@functools.lru_cache(maxsize=256)
def _checker(answer: str) -> Any:
    import jsonschema

    schema = _parse(answer)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as exc:
        raise TaskError(f"json_schema: the gold answer is no JSON schema: {exc.message[:200]}") from exc
    _refuse_remote(schema)
    # This registry knows the schemas of schemas alone and fetches nothing; the default one does.
    return kind(schema, registry=jsonschema.validators.SPECIFICATIONS)


def prepare() -> None:
    """Load the library."""
    _checker("{}")


def _parse(answer: str) -> dict[str, Any]:
    try:
        schema = json.loads(answer)
    except (ValueError, RecursionError) as exc:
        raise TaskError(f"json_schema: the gold answer {answer[:60]!r} is no JSON: {exc}") from exc
    if not isinstance(schema, dict):
        raise TaskError(f"json_schema: the gold answer {answer[:60]!r} is no JSON object")
    return schema


def _refuse_remote(part: Any) -> None:
    if isinstance(part, dict):
        for key in ("$ref", "$dynamicRef"):
            if isinstance(part.get(key), str) and not part[key].startswith("#"):
                raise TaskError(
                    f"json_schema: {key}={part[key][:100]!r} refers to another document; copy it into $defs"
                )
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        _refuse_remote(inner)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
