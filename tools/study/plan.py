"""Which cells there are, and what each one runs. Knows no process and no result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

RDC = ("algorithm.rdc.mode=filter", "algorithm.rdc.signal=drift")

METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "grpo": ("grpo", ()),
    "r3": ("r3", ()),
    "tis": ("tis", ()),
    "rdc_tis": ("rdc", ()),
    "random_tis": ("random", ()),
    "log_ratio_tis": ("rdc", ("algorithm.rdc.signal=log_ratio",)),
    "rdc_outlier_tis": ("rdc", ("algorithm.rdc.gate=outlier",)),
    "log_ratio_outlier_tis": ("rdc", ("algorithm.rdc.signal=log_ratio", "algorithm.rdc.gate=outlier")),
    "behaviour": ("behaviour", ()),
    "behaviour_rdc": ("behaviour", RDC),
    "behaviour_random": ("behaviour", ("algorithm.rdc.mode=random",)),
    "truth_tis": ("tis", ()),
    "tis_sequence_mean": ("tis", ("algorithm.aggregation=sequence_mean",)),
    "tis_constant": ("tis", ("algorithm.aggregation=constant",)),
}
"""Name: file of configs/methods, and settings over it. truth_tis is tis without the faulty generator's responses."""

FILES = tuple(sorted(file.stem for file in (Path(__file__).parents[2] / "configs/methods").glob("*.yaml")))
"""Every file of configs/methods is a method of its own name, too."""
METHODS |= {name: (name, ()) for name in FILES if name not in METHODS}

REGIMES: dict[str, tuple[int, int, int]] = {
    "on_policy": (1, 1, 0),
    "batch_over_4": (4, 4, 3),
    "batch_over_16": (16, 16, 15),
    "async4": (4, 1, 4),
    "async8": (4, 1, 8),
    "async16": (4, 1, 16),
    "async16x4": (4, 4, 16),
}
"""Name: staleness.sync_every, updates_per_take, max_lag. batch_over_16 is the papers' (R, R/16). Only where a take
makes several updates does pi_old differ from pi."""

FLEETS = ("healthy", "mixed_lags", "faulty")
"""mixed_lags: lags 0 to 16 evenly in one batch. faulty: one generator of eight is broken."""

PRECISIONS = ("fp32", "bf16", "fp8")
"""What the generators compute in; the learner has fp32. fp8: weights and inputs of linear layers, fake-quantised."""

BASE = "configs/quickstart.yaml"
GROUPS, SIZE = 8, 8
UPDATES = {"batch_over_16": 96}
"""100 elsewhere; whole takes of 16 updates."""
EVERY = {"batch_over_16": 32}
"""Updates between evaluations; 20 elsewhere. They name a published version."""


class PlanError(ValueError):
    """A selection that names what does not exist, or what no training run can have."""


class Cell(NamedTuple):
    """One training run."""

    method: str
    regime: str
    fleet: str
    precision: str
    seed: int

    @property
    def name(self) -> str:
        """Of its run folder."""
        return f"{self.method}--{self.regime}--{self.fleet}--{self.precision}--s{self.seed}"

    @property
    def is_plain(self) -> bool:
        """True when an ordinary `asyncrl run` makes it, with its own generator."""
        return self.precision == "fp32" and (self.fleet == "healthy" or self.method == "truth_tis")


class Size(NamedTuple):
    """What all cells share: learning rate, share of an update's responses that filters drop, held-out problems."""

    lr: float = 4e-4
    q: float = 0.08
    eval_size: int = 400
    updates: int = 0
    """0: as UPDATES says. lr: plain GRPO collapses at lag 16 and TIS does not, in a pilot with seed 99."""


def cell_of(name: str) -> Cell | None:
    """The cell that a folder's name says, None for other folders."""
    parts = name.split("--")
    if len(parts) != 5 or parts[0] not in METHODS or parts[1] not in REGIMES or not parts[4][1:].isdigit():
        return None
    return Cell(parts[0], parts[1], parts[2], parts[3], int(parts[4][1:]))


def cells(
    methods: Sequence[str],
    regimes: Sequence[str],
    fleets: Sequence[str],
    precisions: Sequence[str],
    seeds: Sequence[int],
) -> list[Cell]:
    """All combinations, seed by seed, so that a study that is cut short has every method at fewer seeds.

    Raises PlanError for unknown names, repeats, and what only the gradient probe can have.
    """
    for what, given, known in (
        ("method", methods, METHODS),
        ("regime", regimes, REGIMES),
        ("fleet", fleets, FLEETS),
        ("precision", precisions, PRECISIONS),
    ):
        for word in given:
            if word not in known:
                raise PlanError(f"unknown {what} {word!r}; one of {', '.join(known)}")
    for what, words in (("method", methods), ("regime", regimes), ("fleet", fleets), ("seed", seeds)):
        if len(set(words)) != len(words) or not words:
            raise PlanError(f"every {what} once, and at least one: {', '.join(map(str, words)) or 'none given'}")
    if any(seed < 0 for seed in seeds):
        raise PlanError(f"seeds are whole numbers from 0 on, got {list(seeds)}")
    if "mixed_lags" in fleets:
        raise PlanError("lags 0 to 16 evenly in one batch are for the gradient probe: a run has the lags it has")
    if "truth_tis" in methods and "healthy" in fleets:
        raise PlanError("truth_tis leaves out the faulty generator, and a healthy fleet has none; use --fleets faulty")
    return [
        Cell(method, regime, fleet, precision, seed)
        for seed in seeds
        for fleet in fleets
        for precision in precisions
        for regime in regimes
        for method in methods
    ]


def arguments(cell: Cell, size: Size, folder: str) -> list[str]:
    """Words of `asyncrl run` that make the cell in folder/NAME."""
    file, settings = METHODS[cell.method]
    sync_every, per_take, max_lag = REGIMES[cell.regime]
    # Without the faulty one of eight generators an eighth of the groups is missing.
    groups = GROUPS - 1 if cell.method == "truth_tis" else GROUPS
    return [
        BASE,
        f"configs/methods/{file}.yaml",
        f"algorithm.rdc.q={size.q:g}",
        *settings,
        f"staleness.sync_every={sync_every}",
        f"staleness.updates_per_take={per_take}",
        f"staleness.max_lag={max_lag}",
        f"algorithm.groups_per_update={groups}",
        f"algorithm.group_size={SIZE}",
        f"learner.lr={size.lr:g}",
        f"learner.updates={size.updates or UPDATES.get(cell.regime, 100)}",
        f"eval.every={EVERY.get(cell.regime, 20)}",
        f"task.eval_size={size.eval_size}",
        f"generator.count={1 if cell.is_plain else 0}",
        f"run.dir={folder}",
        f"run.name={cell.name}",
        f"run.seed={cell.seed}",
        "logging.tensorboard=false",
        "logging.progress=false",
    ]
