"""What a run left behind, as plain records: the proof is made of this and of nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.metrics.sink import read_jsonl

Record = dict[str, Any]


class Settings(NamedTuple):
    """What of the config the proof needs."""

    updates: int
    groups_per_update: int
    max_lag: int
    train_size: int
    capacity_bytes: int
    stale: str


@dataclass
class Evidence:
    """Records in the order in which they were written. logs: text by role; settings of the last start."""

    settings: Settings
    tap: list[Record]
    faults: list[Record]
    status: list[Record]
    metrics: list[Record]
    journal: list[Record]
    facts: Record
    logs: dict[str, str] = field(default_factory=dict)
    earlier_metrics: list[Record] = field(default_factory=list)

    @property
    def committed(self) -> list[Record]:
        """The lines of committed.jsonl that are commits; what it says of rollbacks is not evidence here."""
        return [line for line in self.journal if "group_id" in line]


def load(run_dir: Path) -> Evidence:
    """The evidence of a finished run."""
    import yaml

    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    chaos = run_dir / "chaos"
    faults = lines(chaos / "faults.jsonl")
    updates = [r["updates"] for r in faults if r["event"] == "resume"] or [config["learner"]["updates"]]
    settings = Settings(
        updates[-1], config["algorithm"]["groups_per_update"], config["staleness"]["max_lag"],
        config["task"]["train_size"], config["replay"]["capacity_bytes"], config["staleness"]["stale"],
    )  # fmt: skip
    earlier = sorted(run_dir.glob("metrics-*.jsonl"))
    file = run_dir / "metrics.jsonl"
    return Evidence(
        settings,
        lines(chaos / "tap.jsonl"),
        faults,
        lines(chaos / "status.jsonl"),
        read_jsonl(file) if file.exists() else [],
        lines(run_dir / "committed.jsonl"),
        json.loads((chaos / "facts.json").read_text()),
        {f.stem: f.read_text(errors="replace") for f in sorted((run_dir / "logs").glob("*.log"))},
        [r for f in earlier for r in read_jsonl(f)],
    )


def lines(file: Path) -> list[Record]:
    """Records of a JSON-lines file, none without the file; a torn last line is left out."""
    if not file.exists():
        return []
    text = file.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
