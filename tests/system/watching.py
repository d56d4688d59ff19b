"""What `asyncrl status` and the run's own output say of a run that goes on, against its files."""

from __future__ import annotations

import io
import json
import math

from rich.console import Console

from asyncrl.watch.client import find
from asyncrl.watch.show import show


def _generators(record):
    """Those that a record names."""
    return {n.split("/")[1] for n in record if n.endswith("/in_flight")}


def assert_status_agrees(run):
    """`asyncrl status --json` of a run that has records: the newest one, number by number, and what follows from it."""
    # The first records come before the first heartbeat; the newest ones may not have reached replay yet.
    run.wait_for(lambda: len(run.updates()) > 4 and all(map(_generators, run.updates()[-4:])))
    out = io.StringIO()
    assert show(find(str(run.folder)), True, 30.0, Console(file=out, width=100)) == 0, out.getvalue()
    found = json.loads(out.getvalue())
    state, derived, report = found["state"], found["derived"], found["state"]["report"]
    (record,) = [r for r in run.updates() if r["update"] == report["update"] and r["run/epoch"] == report["epoch"]]
    finite = {k: v for k, v in record.items() if math.isfinite(v)}
    known = {k: v for k, v in report["values"].items() if v is not None}
    # The sink adds what it counts.
    assert known == {k: v for k, v in finite.items() if k not in ("update", "time", "metrics/nan")}
    assert len(known) > 50
    assert derived["phase"] == "running" and derived["updates"]["done"] > record["update"]
    assert derived["updates"]["total"] == state["total_updates"] and derived["updates"]["seconds_each"] > 0
    assert derived["lag"]["mean"] == record["staleness/lag_mean"]
    assert derived["learning"]["reward"] == record["policy/reward"]
    assert derived["tokens_per_s"]["learner"] == record["throughput/learner_tokens_per_s"]
    # One that joined since the newest record is not in it yet.
    recorded = _generators(record)
    assert recorded and recorded <= set(derived["generators"])
    assert all(derived["generators"][g]["alive"] and derived["generators"][g]["version"] for g in recorded)


def assert_told_how_to_watch(run):
    """At its start, on a line each."""
    first = run.output.read_text().partition("\nupdate ")[0].splitlines()
    (watch,) = [line for line in first if line.startswith("watch: ")]
    assert watch.endswith(f"asyncrl status {run.folder} --watch")
    (dashboard,) = [line for line in first if line.endswith("/#custom_scalars")]
    assert f"--logdir {run.folder / 'tb'} " in dashboard
