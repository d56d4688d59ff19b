"""One HTML page of responses: no script, no link outside, everything escaped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from asyncrl.samples.pieces import visible
from asyncrl.samples.source import Found, Part, Sample, Wanted
from asyncrl.samples.words import LEGEND, STEPS, facts, heading, largest, level, number, summary

STYLE = """
body { font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; color: #1b1f24; background: #fff; margin: 2rem auto;
  max-width: 72rem; padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0 }
h2 { font-size: 1.1rem; margin: 2rem 0 .4rem }
p { margin: .4rem 0 }
a { color: #0b57d0; text-decoration: none }
a:hover { text-decoration: underline }
.note { background: #fff6e5; border-radius: 6px; padding: .5rem .9rem; overflow-wrap: anywhere }
.legend span { padding: .1rem .5rem; border-radius: 3px; white-space: nowrap }
.text { font: 14px/1.7 ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  border: 1px solid #e3e6ea; border-radius: 6px; padding: .5rem .8rem; margin: .4rem 0 }
.prompt { background: #f6f8fa; color: #424a53 }
.n { color: #8c959f; font-style: italic; background: #f3f5f8; border-bottom: 1px dashed #8c959f }
section { border-top: 2px solid #d0d7de; margin-top: 1.6rem; padding-top: .6rem }
section h3 { font-size: 1rem; margin: 0; overflow-wrap: anywhere }
table { border-collapse: collapse; font-size: .85rem; margin: .4rem 0 }
th, td { padding: .15rem .7rem .15rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #eef1f4 }
th { color: #57606a; font-weight: 600; white-space: nowrap }
td { overflow-wrap: anywhere }
.index td, .index th { text-align: right; padding-right: 1.2rem }
.index td:last-child, .index th:last-child { text-align: left }
dl { display: grid; grid-template-columns: max-content 1fr max-content 1fr; gap: .1rem 1rem; font-size: .85rem;
  margin: .4rem 0 }
dt { color: #57606a; font-weight: 600 }
dd { margin: 0; overflow-wrap: anywhere }
details { margin: .5rem 0 }
summary { cursor: pointer; font-weight: 600 }
.up { float: right; font-size: .8rem }
.p1 { background: #e3efff } .p2 { background: #b9d7ff }
.p3 { background: #7db3ff } .p4 { background: #1f6feb; color: #fff }
.m1 { background: #ffe9e6 } .m2 { background: #ffc9c2 }
.m3 { background: #ff9488 } .m4 { background: #d1242f; color: #fff }
"""

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Whatever a text of a model were, the browser would load and run nothing."""

FEW = 12
"""So many stand in an open list at the top; a longer one is folded."""

_Key = Callable[[Sample], float]

ORDERS: dict[str, _Key] = {
    "highest drift": lambda s: -s.drift, "largest lag": lambda s: -s.lag, "lowest reward": lambda s: s.reward,
    "longest": lambda s: -s.length, "furthest from the rollout (mean |log pi/mu|)": lambda s: -s.mean_ratio,
}  # fmt: skip
"""Of the lists at the top, besides that of the page."""


def page(found: Found, wanted: Wanted) -> str:
    """The page as HTML."""
    title = f"Samples of {escape(visible(wanted.run_dir.resolve().name))}"
    names = {id(s): f"r{i}" for i, s in enumerate(found.samples, 1)}
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<title>{title}</title><style>{STYLE}</style></head><body id=top>",
        f"<h1>{title}</h1><p>{_text(heading(found, wanted))}</p><p>{_text(summary(found.samples))}</p>",
        *(f"<p class=note>{_text(note)}</p>" for note in found.notes), _legend(),
        "<h2>Lists</h2>", _index("as on this page", found.samples, names, is_open=len(found.samples) <= FEW),
        *(_index(name, sorted(found.samples, key=_last(key)), names) for name, key in ORDERS.items()),
        *(_section(s, names[id(s)]) for s in found.samples), "</body></html>",
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def _last(key: _Key) -> _Key:
    """What is undefined comes last."""
    return lambda s: math.inf if math.isnan(key(s)) else key(s)


def _legend() -> str:
    steps = [
        f"<span class={_class(at)}>{'&le; &minus;' if at < 0 else '&ge; +'}{STEPS[abs(at) - 1]:g}</span>"
        for at in range(-len(STEPS), len(STEPS) + 1) if at
    ]  # fmt: skip
    return (
        f"<p class=legend>{_text(LEGEND)}: {' '.join(steps)}. <span class=n>like this</span>: not sampled by the "
        "policy (observations of an environment, an end token of the engine). The numbers of a token stand under the "
        "mouse.</p>"
    )


def _index(name: str, samples: Sequence[Sample], names: dict[int, str], is_open: bool = False) -> str:
    rows = "".join(
        f"<tr><td><a href=#{names[id(s)]}>{names[id(s)][1:]}</a><td>{s.update}<td>{number(s.reward)}"
        f"<td>{number(s.advantage)}<td>{s.length}<td>{s.lag}<td>{number(s.drift)}<td>{number(s.mean_ratio)}"
        f"<td>{_text(s.took)}</tr>"
        for s in samples
    )
    heads = ("", "update", "reward", "advantage", "length", "lag", "drift", "mean |log pi/mu|", "in the update")
    head = "".join(f"<th>{h}" for h in heads)
    return (
        f"<details{' open' if is_open else ''}><summary>{escape(name)}</summary>"
        f"<table class=index><tr>{head}</tr>{rows}</table></details>"
    )


def _section(s: Sample, name: str) -> str:
    known = dict(facts(s))
    if far := largest(s):
        known["furthest tokens"] = ", ".join(f"{visible(p.text)!r} at {p.start}: {p.ratio:+.2f}" for p in far)
    rows = "".join(f"<dt>{escape(k)}<dd>{_text(v)}" for k, v in known.items())
    return (
        f"<section id={name}><a class=up href=#top>top</a><h3>{name[1:]}. update {s.update}, {_text(s.name)}</h3>"
        f'<div class="text prompt" dir=ltr>{_text(s.prompt)}</div>'
        f"<div class=text dir=ltr>{answer(s)}</div><dl>{rows}</dl></section>"
    )


def answer(s: Sample) -> str:
    """The text of a response, coloured, with the numbers of each token as its title."""
    return "".join(f'<span{_classes(p)} title="{escape(_title(p, s))}">{_text(p.text)}</span>' for p in s.parts)


def _title(p: Part, s: Sample) -> str:
    place = f"token {p.start}" if p.end == p.start + 1 else f"tokens {p.start} to {p.end - 1}"
    version = next((x.version for x in s.spans if x.start <= p.start < x.end), "-")
    ratio = "" if p.ratio is None else f", log pi/mu {p.ratio:+.3f}"
    return f"{place}, version {version}{ratio}" + ("" if p.sampled else ", not sampled by the policy")


def _classes(p: Part) -> str:
    name = "n" if not p.sampled else _class(level(p.ratio))
    return f" class={name}" if name else ""


def _class(at: int) -> str:
    return "" if at == 0 else f"{'p' if at > 0 else 'm'}{abs(at)}"


def _text(text: str) -> str:
    return escape(visible(text))
