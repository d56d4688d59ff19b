"""One HTML page with everything in it: no script, no link outside, pictures as data URIs."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from asyncrl.lens.tables import Table, number, tables

CAPTIONS = {
    "drift_by_lag": "Drift against lag. One dot per response (the highest 0.5 % may lie above the picture); the band: "
    "median to 90th percentile.",
    "drift_by_age": "Mean drift of every dump under each policy, against how many updates lie between that policy and "
    "the weights that sampled.",
    "drift_by_length": "Drift against length. Short responses have few counts, so theirs is the noisiest.",
    "drift_by_layer": "Mean drift of every MoE layer.",
    "drift_by_reward": "Drift against reward.",
    "drift_by_log_ratio": "Drift against the change of token probabilities. A cloud without a slope says that they are "
    "different things.",
    "what_if": "What the filter would have dropped at other rates and numbers of length buckets, against what it would "
    "have kept.",
    "usage": "Change of every expert's share of the tokens. A cross marks an expert that no token chooses any more.",
    "agreement": "Share of tokens whose set of experts is the same on both sides, by layer.",
    "agreement_by_lag": "The same over all layers, by lag at the update.",
}

STYLE = """
body { font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; color: #1b1f24; margin: 2rem auto; max-width: 72rem;
  padding: 0 1rem }
h1 { font-size: 1.6rem; margin: 0 }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem }
p { margin: .4rem 0; max-width: 60rem }
.facts { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0 }
.facts div { background: #f3f5f8; border-radius: 6px; padding: .5rem .9rem }
.facts b { display: block; font-size: 1.25rem; font-weight: 600 }
.facts span { color: #57606a; font-size: .85rem }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(28rem, 1fr)); gap: 1.2rem; margin-top: 1rem }
figure { margin: 0 }
figure img { width: 100%; border: 1px solid #e3e6ea; border-radius: 6px }
figcaption { color: #57606a; font-size: .9rem }
figure.wide { grid-column: 1 / -1; max-width: 60rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .85rem; margin: .5rem 0 }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #e3e6ea }
th { background: #f3f5f8; font-weight: 600 }
td:first-child, th:first-child { text-align: left }
.note { background: #fff6e5; border-radius: 6px; padding: .5rem .9rem }
"""

WIDE = ("what_if", "usage")


def page(numbers: Mapping[str, Any], pictures: Mapping[str, Path]) -> str:
    """The report as HTML."""
    title = f"Router drift of {escape(Path(numbers['run']).name)}"
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        f"<title>{title}</title><style>{STYLE}</style></head><body>",
        f"<h1>{title}</h1><p>{escape(_subtitle(numbers))}</p>", _facts(numbers),
        *(f"<p class=note>{escape(note)}</p>" for note in numbers["notes"]),
        "<h2>Pictures</h2><div class=pictures>", *(_figure(n, f) for n, f in pictures.items()), "</div>",
        *(_table(t) for t in tables(numbers)), "</body></html>",
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def _subtitle(n: Mapping[str, Any]) -> str:
    against = ", ".join(n["against"])
    return (
        f"Model {n['model']}: {len(n['layers'])} MoE layers, top {n['top_k']} of {n['experts']} experts. "
        f"Dumps of {len(n['dumps'])} updates; compared with the policy of: {against}. Filter of the run: {n['mode']}, "
        f"q {n['q']:g}; routes: {n['routes']}."
    )


def _facts(n: Mapping[str, Any]) -> str:
    o = n["overall"]
    spearman = {(c["of"], c["with"]): c["spearman"] for c in n["correlations"]}
    facts = {
        "responses with a drift": number(o["responses"]), "mean drift": number(o["drift"]),
        "90th percentile": number(o["p90"]), "mean lag": number(o["lag"]),
        "Spearman with lag": number(spearman["drift", "lag"], 2),
        "Spearman with |log pi/mu|": number(spearman["drift", "abs_log_ratio"], 2),
        "computed again, largest difference": number(n["sanity"]["max_difference"]),
    }  # fmt: skip
    cells = (f"<div><b>{v}</b><span>{escape(k)}</span></div>" for k, v in facts.items())
    return f"<div class=facts>{''.join(cells)}</div>"


def _figure(name: str, file: Path) -> str:
    data = base64.b64encode(file.read_bytes()).decode()
    caption = escape(CAPTIONS[name])
    wide = " class=wide" if name in WIDE else ""
    picture = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
    return f"<figure{wide}>{picture}<figcaption>{caption}</figcaption></figure>"


def _table(table: Table) -> str:
    text = f"<p>{escape(table.text)}</p>" if table.text else ""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in table.rows)
    return f"<h2>{escape(table.title)}</h2>{text}<div class=scroll><table><tr>{head}</tr>{body}</table></div>"


def plain(found: Iterable[Table]) -> str:
    """Tables for a terminal."""
    blocks = []
    for table in found:
        lines = [table.head, *table.rows]
        widths = [max(len(row[i]) for row in lines) for i in range(len(table.head))]
        text = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in lines
        ]
        blocks.append("\n".join([table.title, *([table.text] if table.text else []), *text]))
    return "\n\n".join(blocks)
