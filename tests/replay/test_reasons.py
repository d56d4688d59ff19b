"""Every reason that the code can count stands in the tables of docs/operations.md, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORD = re.compile(r"^[a-z][a-z0-9_]+$")
# Calls whose arguments name a reason, and functions that return one (alone, or as (reason, sentence)).
DROPS = {"count", "evict", "age_out", "drop", "_give_up", "_refuse", "refuse", "_lost", "generator_lost"}
DROPS |= {"count_refused", "outlast"}
DROP_RETURNS = {"problem", "_problem", "_misfit", "_bad_routes"}
IDLE_RETURNS = {"refusal"}
FOREIGN = {"failed", "eval_failed", "generator"}
# The peers' own words and states that stand beside a reason in such a call.
NOT_REASONS = {"resolved", "trained", "skipped_", "generator_id", "group_id", "mask", "drop", "refill", "evict", "keep"}


def words_in(node: ast.AST) -> set[str]:
    found = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return {w for w in found if WORD.match(w)} - NOT_REASONS


def reasons() -> tuple[set[str], set[str]]:
    """(drop reasons, idle reasons) in the source of replay."""
    drops: set[str] = set()
    idle: set[str] = set()
    for file in sorted((ROOT / "asyncrl/replay").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = node.func.attr
                if name in DROPS:
                    drops |= set().union(*[words_in(a) for a in [*node.args, *[k.value for k in node.keywords]]], set())
                elif name == "count_foreign":
                    drops |= {f"{w}_<error>" for w in words_in(node.args[0])}
            if isinstance(node, ast.FunctionDef) and node.name in DROP_RETURNS | IDLE_RETURNS:
                returned = [n.value for n in ast.walk(node) if isinstance(n, ast.Return) and n.value is not None]
                heads = [v.elts[0] if isinstance(v, ast.Tuple) else v for v in returned]
                words = set().union(*[words_in(h) for h in heads], set())
                (idle if node.name in IDLE_RETURNS else drops).update(words)
            if isinstance(node, ast.FunctionDef) and node.name == "generator_lost":
                drops |= set().union(*[words_in(d) for d in node.args.defaults], set())
            # Variables that carry a reason to one of these calls.
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "reason" for t in node.targets):
                drops |= words_in(node.value)
    return drops, idle


def table(heading: str) -> set[str]:
    """The words in the first column of a section's table."""
    text = (ROOT / "docs/operations.md").read_text()
    section = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {word for row in rows for word in re.findall(r"`([^`]+)`", row)}


def test_the_scan_finds_reasons_of_every_kind():
    drops, idle = reasons()
    assert {"stale", "overtaken", "duplicate", "bad_logprob", "group_size", "zero_variance", "malformed"} <= drops
    assert {"lost_version", "dead_generator", "restarted_generator", "failed_<error>", "no_room", "partial"} <= drops
    assert {"no_version", "capacity", "recovering", "done", "ahead_full", "version_too_old"} <= idle


def test_every_drop_reason_is_documented():
    drops, _ = reasons()
    assert drops - table("What replay drops") == set()


def test_every_idle_reason_is_documented():
    _, idle = reasons()
    assert idle == table("Why generators idle")


def test_every_documented_drop_reason_exists():
    drops, _ = reasons()
    # The socket counts refused_<what> itself; a failure of one kind may have a row of its own.
    transport = "".join(f.read_text() for f in sorted((ROOT / "asyncrl/transport").glob("*.py")))
    extra = table("What replay drops") - drops - {"failed_timeout"}
    assert {
        w for w in extra if f'"{w}"' not in transport and f'"{w.removeprefix("refused_")}"' not in transport
    } == set()
