"""Runs replay and generators for a while and checks that neither memory nor descriptors grow.

    python tools/soak.py --minutes 20 [--generators 2] [--model models/quickstart]

Roles are real processes with the embedded engine. This process stands in for the learner: it takes, commits and
publishes the same weights under a new version at a steady rate, once every --every seconds, and asks for Status as the
learner does. The first quarter of the time is warm-up. Then the median of the last quarter of each role's resident
memory and descriptors may be at most 10 % above that of the quarter after the warm-up. Prints the series and the
verdict; exit status 1 when something grew, or a role died.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from safetensors.torch import load_file

from asyncrl.config import Config, load_config, save_config
from asyncrl.errors import TransportError
from asyncrl.learner.client import ReplayClient
from asyncrl.models.describe import describe
from asyncrl.process import Child, role_environment, start, stop_all
from asyncrl.types import Version
from asyncrl.weights import shm

ROOT = Path(__file__).parents[1]
GROWTH = 0.10
SPARE_BYTES, SPARE_FILES = 8 * 2**20, 5
"""Growth below this is not judged: allocators and caches."""


class Sample(NamedTuple):
    """One look at a role: seconds since start, resident bytes of it and its children, descriptors."""

    at: float
    rss: int
    files: int


def look(child: Child, began: float) -> Sample:
    """Memory and descriptors of a role. RuntimeError when it died."""
    if child.returncode is not None:
        raise RuntimeError(f"{child.name} ended with status {child.returncode}: {child.cause()}")
    process = psutil.Process(child.process.pid)
    family = [process, *process.children(recursive=True)]
    return Sample(time.monotonic() - began, sum(p.memory_info().rss for p in family), sum(p.num_fds() for p in family))


def growth(series: Sequence[Sample], total: float) -> str:
    """What grew between the second and the last quarter, or ""."""
    early = [s for s in series if total / 4 <= s.at < total / 2]
    late = [s for s in series if s.at >= 3 * total / 4]
    if not early or not late:
        return "too few samples"
    found = []
    for name, spare in (("rss", SPARE_BYTES), ("files", SPARE_FILES)):
        a, b = (statistics.median(getattr(s, name) for s in part) for part in (early, late))
        if b > a * (1 + GROWTH) and b - a > spare:
            found.append(f"{name} {a:.0f} -> {b:.0f} ({100 * (b / a - 1):+.1f} %)")
    return ", ".join(found)


class Learner:
    """Takes, commits and publishes; trains nothing."""

    def __init__(self, config: Config, weights: Path) -> None:
        self._weights = load_file(weights / "model.safetensors")
        self._publisher = shm.Publisher(config.run_dir / "weights")
        settings = config.shared_settings()
        self._client = ReplayClient(
            config.run_dir / "replay.address", 0, describe(config.model.path), 120.0, settings=settings
        )
        self.update = self.groups = 0
        self._publish()

    def _publish(self) -> None:
        version = Version(0, self.update)
        source = self._publisher.publish(version, self._weights.items())
        self._client.published(version, source, self.update)

    def step(self) -> None:
        """One update. TransportError when replay has no take for two minutes."""
        shard = self._client.take(self.update, self.update, 0, 1, 120.0)
        for groups in shard.batches:
            batch, self.update = self.update, self.update + 1
            self._client.commit(shard.take_id, self.update, "trained", [g.group_id for g in groups], batch)
            self.groups += len(groups)
        self._publish()
        self._client.status()

    def close(self) -> None:
        """Let go of everything."""
        self._client.close()
        self._publisher.close()


def soak(config: Config, minutes: float, every_s: float, generators: int) -> dict[str, list[Sample]]:
    """The series of every role. RuntimeError or TransportError when one of them died."""
    file = config.run_dir / "config.yaml"
    config.run_dir.mkdir(parents=True)
    save_config(config, file)
    children: list[Child] = []

    def begin(name: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "asyncrl", *arguments]
        children.append(start(name, command, role_environment(1), config.run_dir / "logs" / f"{name}.log"))

    learner = None
    try:
        begin("replay", "replay", str(file))
        for i in range(generators):
            begin(f"g{i}", "generate", str(file), "--id", f"g{i}")
        learner = Learner(config, Path(config.model.path))
        learner.step()
        began = time.monotonic()
        series: dict[str, list[Sample]] = {child.name: [] for child in children}
        shown = 0.0
        while (now := time.monotonic() - began) < 60 * minutes:
            learner.step()
            for child in children:
                series[child.name].append(look(child, began))
            if now - shown >= 60 * minutes / 20:
                shown = now
                parts = [f"{n} {s[-1].rss / 2**20:.0f} MB {s[-1].files} fd" for n, s in series.items()]
                print(f"{now:6.0f} s  {learner.groups} groups  {'  '.join(parts)}", flush=True)
            time.sleep(max(0.0, every_s - (time.monotonic() - began - now)))
        return series
    finally:
        if learner is not None:
            learner.close()
        stop_all(children, 10.0)


def main() -> None:
    """Soak and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--generators", type=int, default=2)
    parser.add_argument("--every", type=float, default=0.5, help="seconds per update")
    parser.add_argument("--model", default=str(ROOT / "models" / "quickstart"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"run.dir={folder}", "run.name=soak", f"model.path={arguments.model}", "algorithm.groups_per_update=8",
            "staleness.sync_every=1", "generator.groups_in_flight=8", "learner.updates=1000000",
        ]  # fmt: skip
        config = load_config(ROOT / "configs" / "quickstart.yaml", overrides)
        try:
            series = soak(config, arguments.minutes, arguments.every, arguments.generators)
        except (RuntimeError, TransportError) as exc:
            print(f"failed: {exc}")
            sys.exit(1)
    verdicts = {name: growth(samples, 60 * arguments.minutes) for name, samples in series.items()}
    for name, verdict in verdicts.items():
        print(f"{name}: {verdict or 'flat'}")
    sys.exit(int(any(verdicts.values())))


if __name__ == "__main__":
    main()
