"""Write the tables of docs/models.md from asyncrl/models/families.py; the text around them is kept.

python tools/models_reference.py docs/models.md            write them
python tools/models_reference.py --check docs/models.md    exit 1 when they are out of date
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from asyncrl.models.families import FORMULAS, REFUSED, SERVED, Family

MARK = re.compile(r"(<!-- begin (\w+): make docs writes it -->\n).*?(<!-- end \2 -->)", re.S)


def weights(family: Family) -> str:
    """The formula by default, and the config field that changes it."""
    text = f"`{family.formula({})}`"
    if isinstance(family.normalised, str) and family.scores_field is None:
        other = family.formula({family.normalised: not family.normalised_by_default})
        text += f"; `{other}` with `{family.normalised}: {str(not family.normalised_by_default).lower()}`"
    if family.scores_field is not None:
        text += f"; other scores by `{family.scores_field}`"
    return text


def served() -> Iterator[str]:
    yield "| model type | weights of the chosen experts | packing | attention |"
    yield "| --- | --- | --- | --- |"
    for model_type, family in sorted(SERVED.items()):
        packing = "yes" if family.packing else "no"
        attention = "sdpa, eager" if family.sdpa else "eager"
        yield f"| `{model_type}` | {weights(family)} | {packing} | {attention} |"


def formulas() -> Iterator[str]:
    yield "| kind | weight of a chosen expert, up to a constant factor |"
    yield "| --- | --- |"
    yield from (f"| `{kind}` | {what} |" for kind, what in FORMULAS.items())


def refused() -> Iterator[str]:
    yield "| model type | why |"
    yield "| --- | --- |"
    by_reason = sorted(REFUSED.items(), key=lambda item: (list(REFUSED.values()).index(item[1]), item[0]))
    for reason, items in groupby(by_reason, key=lambda item: item[1]):
        names = ", ".join(f"`{model_type}`" for model_type, _ in items)
        yield f"| {names} | {reason} |"


TABLES = {"served": served, "formulas": formulas, "refused": refused}


def page(text: str) -> str:
    return MARK.sub(lambda m: m[1] + "\n" + "\n".join(TABLES[m[2]]()) + "\n\n" + m[3], text)


def main() -> int:
    (target,) = [Path(a) for a in sys.argv[1:] if not a.startswith("--")]
    text = target.read_text(encoding="utf-8")
    if {m[2] for m in MARK.finditer(text)} != TABLES.keys():
        print(f"{target} lacks the marks of one of the tables {', '.join(TABLES)}")
        return 1
    if "--check" not in sys.argv:
        target.write_text(page(text), encoding="utf-8")
    elif text != page(text):
        print(f"{target} is out of date; run `make docs`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
