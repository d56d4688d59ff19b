"""The probe's cells, and the driver that measures them: one process per weight trajectory, one file per batch.

PROBE/s1.safetensors holds the weights of trajectory 1, PROBE/s1-b3.json what its batch 3 gave; both are written last
and whole, so what was cut off is made again and nothing else.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncrl.sections.algorithm import AlgorithmSection
from study.emulate import Lab, Sampling, restore, save, study_config, trajectory
from study.faults import FAULTS, Kind
from study.plan import GROUPS, SIZE, Size
from study.probe import (
    QS,
    Sums,
    advantages_of,
    auc,
    batch_gradient,
    cosine,
    keeps,
    mismatch_summary,
    oracle_keep,
    response_gradients,
    scored_table,
)
from study.runs import say_now

MODEL = "models/quickstart"
PROMPTS = 16
FRESH = 32
"""On-policy responses per prompt, in two halves."""
UPDATES, LAG = 48, 8
"""Length of a weight trajectory, and the lag of the responses that it was trained on."""
FIRST = 20
"""Update of the first batch; lag 16 needs 16 older weights, and the first updates are warm-up."""
GUESS_S = 45.0
"""CPU seconds of a batch while none was measured."""


History = Mapping[int, Mapping[str, Tensor]]


class ProbeCell(NamedTuple):
    """What sampled a batch: lag of all responses, "0-16" (one group of each) or "4" with a fault in one of 8 groups."""

    fleet: str
    lag: str
    precision: str
    correction: str = "tis"

    @property
    def name(self) -> str:
        """In tables and files."""
        return f"{self.fleet}, lag {self.lag}, {self.precision}, {self.correction}"


HEALTHY = [ProbeCell("healthy", lag, "fp32") for lag in ("0", "4", "8", "16")]
HEALTHY += [ProbeCell("healthy", lag, precision) for precision in ("bf16", "fp8") for lag in ("0", "16")]
CELLS = [
    *HEALTHY,
    ProbeCell("healthy", "16", "fp32", "none"),
    *(ProbeCell("mixed_lags", "0-16", precision) for precision in ("fp32", "fp8")),
    *(ProbeCell(fault, "4", "fp32") for fault in FAULTS),
    ProbeCell("noise", "4", "fp32", "none"),
    ProbeCell("noise", "4", "fp8"),
]


def how_sampled(cell: ProbeCell, update: int, batch: int) -> tuple[list[Sampling], list[bool]]:
    """How each of the PROMPTS groups is sampled, and which ones come from the broken generator."""
    if cell.fleet == "mixed_lags":
        lags = [g * 16 // (PROMPTS - 1) for g in range(PROMPTS)]
        return [Sampling(Kind(cell.precision), update - n, update - n) for n in lags], [False] * PROMPTS
    w = update - int(cell.lag)
    good = Sampling(Kind(cell.precision), w, w)
    if cell.fleet == "healthy":
        return [good] * PROMPTS, [False] * PROMPTS
    if cell.fleet == "missed_syncs":
        bad = good._replace(weights=w - 16)
    else:
        bad = good._replace(kind=Kind(cell.precision, cell.fleet))
    # Two of 16 groups, others in every batch.
    broken = {(2 * batch) % PROMPTS, (2 * batch + 9) % PROMPTS}
    return [bad if g in broken else good for g in range(PROMPTS)], [g in broken for g in range(PROMPTS)]


def measure(
    lab: Lab, history: Mapping[int, Mapping[str, Tensor]], update: int, batch: int, seed: int
) -> dict[str, Any]:
    """Every cell on one batch of prompts, under the weights of one update."""
    lab.loader.load(history[update])
    base = 100_000_000 * seed + 1_000_000 * batch
    prompts = [lab.prompts[(seed * 1009 + batch * PROMPTS + i) % len(lab.prompts)] for i in range(PROMPTS)]
    a = lab.config.algorithm
    halves = [_fresh(lab, history, prompts, update, a, base + 1000 * k) for k in (1, 2)]
    target = halves[0] + halves[1]
    out: dict[str, Any] = {"seed": seed, "batch": batch, "update": update, "cells": {}}
    out["reference"] = cosine(*halves)
    for number, cell in enumerate(CELLS):
        how, broken = how_sampled(cell, update, batch)
        # The same seed in all cells: they differ in nothing but what the cell says.
        groups = lab.sample(prompts, how, history, SIZE, base + 5000)
        rows = lab.rows(groups, update)
        correction = a.correction.model_copy(update={"kind": cell.correction})
        out["cells"][cell.name] = _cell(
            lab, rows, [bad for bad in broken for _ in range(SIZE)], a.model_copy(update={"correction": correction}),
            target, halves, update * 1000 + number,
        )  # fmt: skip
    return out


def _fresh(
    lab: Lab, history: History, prompts: Sequence[Any], update: int, a: AlgorithmSection,
    seed: int,
) -> Tensor:  # fmt: skip
    """Direction of half of the on-policy responses."""
    how = [Sampling(Kind(), update, update)] * len(prompts)
    rows = lab.rows(lab.sample(prompts, how, history, FRESH // 2, seed), update)
    advantages = advantages_of(scored_table(lab.policy, rows, lab.config, lab.info), a)
    tokens = float(sum(int(r.loss_mask.sum()) for r in rows))
    return batch_gradient(lab.policy, rows, advantages, tokens, a, lab.info)


def _cell(
    lab: Lab, rows: list[Any], broken: Sequence[bool], a: AlgorithmSection, target: Tensor, halves: Sequence[Tensor],
    update: int,
) -> dict[str, Any]:  # fmt: skip
    """Cosine under every filter, and what the batch was like."""
    table = scored_table(lab.policy, rows, lab.config, lab.info)
    advantages = advantages_of(table, a)
    gradients = response_gradients(lab.policy, rows, advantages, float(table["tokens"].sum()), a, lab.info)
    sums, bad = Sums(gradients), torch.tensor(broken) if any(broken) else None
    along, parts = sums.towards(target), [sums.towards(half) for half in halves]
    everything = torch.ones(len(rows), dtype=torch.bool)
    filters = []
    for one in keeps(table, bad, a, update):
        keep, control = one.pop("keep"), one.pop("control")
        one["cosine"] = sums.cosine(keep, along)
        one["random"] = fmean(sums.cosine(m, along) for m in control)
        one["dropped"] = float((~keep).double().mean())
        if bad is not None:
            one["hits"] = float((~keep)[bad].double().mean())
        filters.append(one)
    for q in QS:
        gains = [
            sums.cosine(oracle_keep(mine, q), other) - sums.cosine(everything, other)
            for mine, other in (parts, parts[::-1])
        ]
        filters.append({"signal": "oracle", "gate": "half", "q": q, "gain": fmean(gains)})
    drift, ratio = torch.from_numpy(table["drift"]), torch.from_numpy(table["abs_log_ratio"])
    found = {"auc_drift": auc(drift, bad), "auc_log_ratio": auc(ratio, bad)} if bad is not None else {}
    return {"filters": filters, **mismatch_summary(table), **found}


# --- driver ---------------------------------------------------------------------------------------


def run_probe(root: Path, seeds: Sequence[int], batches: int, jobs: int, dry_run: bool) -> int:
    """Measure what is missing, `jobs` trajectories at a time. Returns 1 when one failed."""
    folder = root / "probe"
    most = (UPDATES - FIRST) // 4 + 1
    if batches > most:
        print(f"study: a trajectory has room for {most} batches", file=sys.stderr)
        return 2
    left = {s: [b for b in range(batches) if not _file(folder, s, b).is_file()] for s in seeds}
    known = [json.loads(f.read_text())["cpu_s"] for f in sorted(folder.glob("s*-b*.json"))]
    each, count = fmean(known) if known else GUESS_S, sum(map(len, left.values()))
    basis = "measured" if known else "a guess"
    print(
        f"{count} batches of {len(CELLS)} cells to measure, {each:.0f} CPU s each ({basis}): "
        f"{count * each / 60:.0f} CPU minutes"
    )
    if dry_run:
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    mine = [s for s in seeds if left[s]]
    if len(mine) <= 1:
        for seed in mine:
            _measure_all(folder, seed, left[seed])
        return 0
    return _in_processes(root, mine, batches, jobs)


def _in_processes(root: Path, seeds: Sequence[int], batches: int, jobs: int) -> int:
    """One process per trajectory; waits for all of them."""
    script, running, failed, waiting = sys.argv[0], list[subprocess.Popen[bytes]](), 0, list(seeds)
    while waiting or running:
        while waiting and len(running) < max(1, jobs):
            words = ["probe", "--seeds", str(waiting.pop(0)), "--batches", str(batches), "--dir", str(root)]
            running.append(subprocess.Popen([sys.executable, script, *words]))
        time.sleep(0.2)
        for process in [p for p in running if p.poll() is not None]:
            running.remove(process)
            failed += process.returncode != 0
    return int(failed > 0)


def _file(folder: Path, seed: int, batch: int) -> Path:
    return folder / f"s{seed}-b{batch}.json"


def _measure_all(folder: Path, seed: int, batches: Sequence[int], say: Callable[[str], None] = say_now) -> None:
    torch.set_num_threads(1)
    words = [f"algorithm.groups_per_update={GROUPS}", f"algorithm.group_size={SIZE}", f"learner.updates={UPDATES}"]
    lab = Lab(study_config(MODEL, Size(), words))
    try:
        file = folder / f"s{seed}.safetensors"
        if not file.is_file():
            history, rewards = trajectory(lab, UPDATES, LAG, seed)
            save(history, file)
            say(f"trajectory {seed}: reward {fmean(rewards[:5]):.2f} -> {fmean(rewards[-5:]):.2f}")
        history = restore(file)
        for batch in batches:
            before = _cpu_s()
            found = measure(lab, history, FIRST + 4 * batch, batch, seed)
            found["cpu_s"] = _cpu_s() - before
            partial = folder / f"s{seed}-b{batch}.partial"
            partial.write_text(json.dumps(found))
            partial.rename(_file(folder, seed, batch))
            say(f"{time.strftime('%H:%M:%S')} trajectory {seed}, batch {batch}: {found['cpu_s']:.0f} CPU s")
    finally:
        lab.close()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
