"""Write docs/config.md from asyncrl/sections: key, type, default, bounds, docstring.

python tools/config_reference.py docs/config.md            write it
python tools/config_reference.py --check docs/config.md    exit 1 when it is out of date
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

sys.path.insert(0, str(Path(__file__).parents[1]))

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import asyncrl.sections
from asyncrl.config import Config, listed

HEAD = """# Settings

Generated from `asyncrl/sections` by `make docs`; do not edit. One YAML holds the sections below; several files and
`key=value` overrides merge from left to right. `asyncrl config FILE... [key=value...]` prints the result and checks it.
Unknown keys, wrong types, values out of range and settings that contradict each other are refused before any process
starts, with the key, the value and the remedy.
"""


def attribute_docs(source: str) -> dict[tuple[str, str], str]:
    """(class, attribute) -> the string that follows the attribute."""
    docs: dict[tuple[str, str], str] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for item, after in zip(node.body, node.body[1:], strict=False):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and is_text:
                docs[node.name, item.target.id] = " ".join(str(after.value.value).split())
    return docs


def bounds(info: FieldInfo) -> str:
    words = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = []
    for meta in info.metadata:
        for attribute, sign in words.items():
            if (value := getattr(meta, attribute, None)) is not None:
                found.append(f"{sign} {value}")
    return ", ".join(found)


@cache
def aliases() -> dict[str, str]:
    """Names that stand for choices in the sections, such as those of the registry, to the choices."""
    found: dict[str, str] = {}
    for file in sources():
        for name, value in vars(importlib.import_module(f"asyncrl.sections.{file.stem}")).items():
            if get_origin(value) is Literal:
                found[name] = " | ".join(map(str, get_args(value)))
    return found


def kind(info: FieldInfo, annotation: str) -> str:
    names = {"Positive": "int", "NonNegative": "int", "Seconds": "seconds", **aliases()}
    for name, plain in names.items():
        annotation = annotation.replace(name, plain)
    # Literal["a", "b"] | int  ->  a | b | int
    annotation = re.sub(r"Literal\[([^]]*)\]", lambda m: m[1].replace('"', "").replace(", ", " | "), annotation)
    annotation = annotation.replace(" | ", " \\| ")
    limit = bounds(info)
    return f"{annotation}, {limit}" if limit else annotation


def annotations(source: str) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    found[node.name, item.target.id] = ast.unparse(item.annotation).replace("'", '"')
    return found


def show(value: Any) -> str:
    if value is None:
        return "none"
    return f"`{list(value)}`" if isinstance(value, tuple) else f"`{value}`"


def section(model: type[BaseModel], prefix: str, docs: dict[Any, str], types: dict[Any, str]) -> list[str]:
    title = f"`{prefix.rstrip('.')}`"
    lines = [f"\n## {title}\n", " ".join((model.__doc__ or "").split()), ""]
    inner: list[str] = []
    rows = []
    for name, info in model.model_fields.items():
        annotation = info.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            inner += section(annotation, f"{prefix}{name}.", docs, types)
            continue
        if (entries := listed(annotation)) is not None:
            inner += section(entries, f"{prefix}{name}[].", docs, types)
        default = "required" if info.is_required() else show(info.get_default(call_default_factory=True))
        owner = next(c.__name__ for c in model.__mro__ if (c.__name__, name) in types)
        text = docs.get((owner, name), "").replace("|", "\\|")
        rows.append(f"| `{prefix}{name}` | {kind(info, types[owner, name])} | {default} | {text} |")
    return [*lines, "| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows, *inner]


def sources() -> list[Path]:
    return sorted(Path(asyncrl.sections.__path__[0]).glob("*.py"))


def page() -> str:
    source = "\n".join(f.read_text() for f in sources())
    docs, types = attribute_docs(source), annotations(source)
    lines = [HEAD.rstrip()]
    for name, info in Config.model_fields.items():
        assert isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
        lines += section(info.annotation, f"{name}.", docs, types)
    return "\n".join(lines) + "\n"


def main() -> int:
    check = "--check" in sys.argv
    (target,) = [Path(a) for a in sys.argv[1:] if not a.startswith("--")]
    if not check:
        target.write_text(page(), encoding="utf-8")
        return 0
    if not target.exists() or target.read_text(encoding="utf-8") != page():
        print(f"{target} is out of date; run `make docs`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
