"""The proof: each line is a claim about a run under chaos, with the value found and the one expected."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

from asyncrl.metrics.sink import timeline
from asyncrl.replay.journal import surviving
from chaos_lib.acknowledged import fates
from chaos_lib.evidence import Evidence, Record
from chaos_lib.timeline import Fork, forks, is_lost, last_told, repeated, split


class Line(NamedTuple):
    """One claim. detail: a few examples of what breaks it."""

    claim: str
    value: Any
    expected: str
    ok: bool
    detail: str = ""


def verify(evidence: Evidence) -> list[Line]:
    """Every claim, the broken ones too."""
    fork = forks(evidence.tap)
    kept, undone = split(evidence.committed, fork)
    dropped = {d[0]: d[1] for s in evidence.status for d in s["dropped"]}
    return [
        *_groups(evidence, kept, undone, dropped, fork),
        *_prompts(evidence, kept, dropped),
        *_age(evidence, fork),
        *_progress(evidence, kept),
        *_machine(evidence),
        *_messages(evidence),
        *_roles(evidence),
    ]


def _zero(claim: str, broken: Iterable[Any], note: str = "") -> Line:
    found = list(broken)
    detail = ", ".join(str(b) for b in found[:5])
    return Line(claim, len(found), "0", not found, detail if found else note)


def _groups(
    e: Evidence, kept: list[Record], undone: list[Record], dropped: dict[str, str], fork: dict[int, Fork]
) -> Iterator[Line]:
    ids = [line["group_id"] for line in kept]
    fate = fates(e, undone, set(ids) | set(dropped), fork)
    yield Line("groups acknowledged by replay", fate.acknowledged, "> 0", fate.acknowledged > 0)
    again = ", ".join(f"{k} {n}" for k, n in sorted(fate.again.items()))
    yield _zero("acknowledged groups lost", fate.lost, f"given out again: {again or 'none'}")
    yield _zero("trained twice on the surviving timeline", repeated(ids))
    yield _zero("trained and also reported dropped", sorted(set(ids) & set(dropped)))
    both = {line["group_id"] for line in undone}
    open_again = both - set(ids) - set(dropped)
    counted = int(e.status[-1]["counters"].get("rolled_back", 0)) if e.status else 0
    note = f"{len(both & set(ids))} of them trained again, {len(open_again)} open at the end"
    yield Line("rolled back: lines undone = counted by replay", len(undone), str(counted), len(undone) == counted, note)
    theirs = [dict(line) for line in surviving(e.journal)]
    yield _zero("lines on which asyncrl's own surviving timeline differs", _difference(theirs, kept))


def _difference(theirs: list[Record], mine: list[Record]) -> Iterator[str]:
    for a, b in zip_longest(theirs, mine):
        if a != b:
            yield f"{a} against {b}"


def _prompts(e: Evidence, kept: list[Record], dropped: dict[str, str]) -> Iterator[Line]:
    """Every prompt that was given out is trained, reported or still open when the run ends."""
    given = {group_id for event in e.tap if event["kind"] == "leases" for group_id, _ in event["given"]}
    resolved = {line["group_id"] for line in kept} | set(dropped)
    opened = given - resolved
    last = e.status[-1]["counters"] if e.status else {}
    limit = int(last.get("run_over", 0))
    yield Line("prompts open at the end", len(opened), f"<= {limit} (run_over)", len(opened) <= limit)
    by_epoch: dict[int, set[str]] = {}
    for group_id in given | resolved:
        by_epoch.setdefault(int(group_id.partition("/")[0]), set()).add(group_id)
    newest = max(by_epoch, default=0)
    done = [d for d, ids in by_epoch.items() if d < newest and not ids & opened]
    short = [
        f"epoch {d}: {len(by_epoch[d])}" for d in by_epoch if d < newest and len(by_epoch[d]) != e.settings.train_size
    ]
    yield _zero(f"data epochs passed that lack some of {e.settings.train_size} prompts", short)
    # What a passed epoch still has open must be young: it was given out among the last groups of the run.
    left = [i for i in opened if int(i.partition("/")[0]) < newest - 1]
    yield _zero("prompts left behind by more than one data epoch", left)
    wrong = [d for d in done if len(by_epoch[d] & resolved) != e.settings.train_size]
    reasons = dict(Counter(dropped.values()))
    yield _zero(
        f"finished data epochs ({len(done)}) not trained exactly once or reported", wrong, f"dropped: {reasons or 0}"
    )


def _age(e: Evidence, fork: dict[int, Fork]) -> Iterator[Line]:
    lags = [r["staleness/lag_max"] for r in e.metrics + e.earlier_metrics if "staleness/lag_max" in r]
    largest = max(lags, default=-1.0)
    yield Line(
        "largest lag of a trained token", largest, f"<= {e.settings.max_lag}", 0 <= largest <= e.settings.max_lag
    )
    seen = _versions(e)
    yield _zero("groups trained without a token young enough, or of lost versions", _too_old(e, fork, seen))
    unseen = [line["group_id"] for line in e.committed if (line["generator_id"], line["group_id"]) not in seen]
    yield _zero("groups committed of which no result was seen", unseen)
    yield _zero("publications that did not rise", _falls(e.tap))
    held: dict[tuple[str, int], tuple[int, int]] = {}
    falls = []
    for event in e.tap:
        if event["kind"] == "held":
            who, version = (event["link"], event["client"]), tuple(event["version"])
            if version < held.get(who, version):
                falls.append(f"{who}: {held[who]} to {version}")
            held[who] = version
    yield _zero("generators whose version fell", falls)


Seen = dict[tuple[str, str], list[list[tuple[int, int]]]]


def _versions(e: Evidence) -> Seen:
    """The versions in the frames of every result, by generator and group."""
    seen: Seen = {}
    for event in e.tap:
        if event["kind"] == "group":
            seen.setdefault((event["generator"], event["id"]), []).append([(v[0], v[1]) for v in event["versions"]])
    return seen


def _too_old(e: Evidence, fork: dict[int, Fork], seen: Seen) -> Iterator[str]:
    """Independent of the learner's own figure: the versions in the groups' frames against the update that used them."""
    young = max if e.settings.stale == "mask" else min
    for line in e.committed:
        results = seen.get((line["generator_id"], line["group_id"]))
        if line["outcome"] != "trained" or results is None:
            continue
        if not any(
            line["update"] - young(v[1] for v in versions) <= e.settings.max_lag
            and not any(is_lost(v, line["epoch"], fork) for v in versions)
            for versions in results
        ):
            yield f"{line['group_id']} at update {line['update']}"


def _falls(tap: list[Record]) -> Iterator[str]:
    newest: tuple[int, ...] = (-1, -1)
    known = set()
    for event in tap:
        if event["kind"] == "published":
            version = tuple(event["version"])
            # A replay that was started again is told again what it may have missed.
            if version not in known and version < newest:
                yield f"{version} after {newest}"
            known.add(version)
            newest = max(newest, version)


def _progress(e: Evidence, kept: list[Record]) -> Iterator[Line]:
    updates = last_told([int(r["update"]) for r in e.metrics if "policy/reward" in r])
    want = list(range(e.settings.updates))
    yield Line("updates that count in metrics.jsonl, in order", len(updates), str(len(want)), updates == want,
               "" if updates == want else f"missing {sorted(set(want) - set(updates))[:5]}")  # fmt: skip
    theirs = [int(r["update"]) for r in timeline(e.metrics) if "policy/reward" in r]
    yield Line("asyncrl's own timeline of metrics.jsonl = this one", theirs == updates, "True", theirs == updates)
    trained = Counter(int(line["update"]) for line in kept if line["outcome"] == "trained")
    small = [f"update {u}: {n}" for u, n in sorted(trained.items()) if n != e.settings.groups_per_update]
    without = [f"update {u}: 0" for u in want if u not in trained]
    losses = int(e.status[-1]["counters"].get("lost_payload", 0)) if e.status else 0
    yield Line("updates without their whole batch", len(small + without), f"<= {losses} (lost_payload)",
               len(small + without) <= losses, ", ".join((small + without)[:5]))  # fmt: skip
    last = max((f["t"] for f in e.faults if f["event"] == "fault"), default=0.0)
    after = sum(event["kind"] == "commit" and event["t"] > last for event in e.tap)
    yield Line("batches committed after the last fault", after, "> 0", after > 0)
    yield _zero(
        "failures of the harness to bring the run to its end", [f["why"] for f in e.faults if f["event"] == "failure"]
    )


def _machine(e: Evidence) -> Iterator[Line]:
    cap = e.settings.capacity_bytes
    peak = max((int(s.get("peak_bytes", s["bytes"])) for s in e.status), default=-1)
    yield Line("payload peak, bytes", peak, f"<= {cap}", 0 <= peak <= cap, f"{100 * peak // cap} % of the cap")
    yield _zero("processes left", e.facts["processes"])
    left = [f"{f['role']}: {f['commands'][0]}" for f in e.faults if f["event"] == "left"]
    yield _zero("roles started again beside what their last process left", left)
    yield _zero("ports left open", e.facts["ports"])
    yield _zero("folders left in shared memory", e.facts["shared_memory"])
    own = int(e.facts["own_descriptors"])
    yield Line("descriptors left in this process", own, "0", own == 0)
    grown = []
    for number in {s["incarnation"] for s in e.status}:
        counts = [s["fds"] for s in e.status if s["incarnation"] == number and s["fds"]]
        settled = counts[len(counts) // 4 :]
        if settled and settled[-1] > max(settled[: max(1, len(settled) // 4)]) + 8:
            grown.append(f"process {number}: {settled[0]} to {settled[-1]}")
    yield _zero("processes of replay whose descriptors grow", grown)


NEVER = [
    "malformed",
    "bad_request",
    "unknown_group",
    "unknown_attempt",
    "wrong_prompt",
    "future_version",
    "group_size",
    "duplicate_trajectory",
    "bad_logprob",
    "bad_token",
    "bad_routes",
    "refused_peer",
    "too_large",
]
"""Counters of replay that no fault of ours explains."""


def _messages(e: Evidence) -> Iterator[Line]:
    counters = e.status[-1]["counters"] if e.status else {}
    yield _zero("messages that replay refused", [f"{k} {counters[k]}" for k in NEVER if counters.get(k)])
    unread = [event["error"] for event in e.tap if event["kind"] == "unreadable"]
    yield _zero("messages that the proxies could not read", unread)


EXPECTED = {"killed": {-9}, "rank killed": {1, 137, -9}, "terminated": {0, 143, -15}, "ordered": {0, 143, -15}, "": {0}}
"""Exit statuses by what we did."""

NOISE = re.compile(r"ChildFailedError|SignalException|KeyboardInterrupt")


def _roles(e: Evidence) -> Iterator[Line]:
    exits = [f for f in e.faults if f["event"] == "exit"]
    wrong = [
        f"{f['role']} process {f['incarnation']}: status {f['status']} ({f['cause'] or 'by itself'})"
        for f in exits
        if f["status"] not in EXPECTED[f["cause"].partition(":")[0]]
    ]
    yield _zero("roles that ended with an error that was not our doing", wrong)
    found = []
    for name, text in e.logs.items():
        blocks = text.split("Traceback (most recent call last)")[1:]
        found += [f"{name}: {_last_line(b)}" for b in blocks if not NOISE.search(b)]
        found += [f"{name}: {line[:160]}" for line in text.splitlines() if " ERROR asyncrl" in line]
    yield _zero("tracebacks and errors in the logs", found)
    kinds = Counter(f"{f['kind']} {f['target']}" for f in e.faults if f["event"] == "fault")
    note = ", ".join(f"{k} {n}" for k, n in sorted(kinds.items()))
    yield Line("faults", sum(kinds.values()), "> 0", bool(kinds), note)


def _last_line(block: str) -> str:
    """The line that names the error of a traceback."""
    lines = [line for line in block.splitlines()[1:] if line and not line.startswith(" ")]
    return lines[0][:160] if lines else "?"


def table(lines: list[Line]) -> str:
    """The claims as text, one a row."""
    width = max(len(line.claim) for line in lines)
    rows = []
    for line in lines:
        state = "ok" if line.ok else "FAILED"
        rows.append(
            f"{line.claim:<{width}}  {line.value!s:>10}  {line.expected:<24}  {state:<6}  {line.detail}".rstrip()
        )
    return "\n".join(rows)
