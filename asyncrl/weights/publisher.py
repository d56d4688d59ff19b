"""The publishing side of a carrier, whichever it is: one protocol, one place that picks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from asyncrl.errors import ConfigError
from asyncrl.types import Version
from asyncrl.weights import disk, shm, zmq
from asyncrl.weights.collective import publisher as collective
from asyncrl.weights.rollout import Weights, for_sglang


class Publisher(Protocol):
    """Makes versions visible to readers; `weights.reader.Reader` is the other side."""

    counters: Counter[str]
    """Since start, for metrics; docs/metrics.md has each."""

    def publish(self, version: Version, weights: Weights) -> str:
        """Make version visible, complete, and return its source. WeightSyncError: nothing is visible."""
        ...

    def close(self) -> None:
        """Let go of every version. Safe to call twice."""
        ...


@dataclass(frozen=True)
class Engines:
    """What `collective` and `disk` must know of the engines.

    start: the model folder that they start from. sglang: they are SGLang servers, which get more than the learner has
    (weights.rollout). quantize: form of the weights there. groups: of collective.
    """

    start: Path
    sglang: bool
    quantize: Literal["none", "fp8_block"] = "none"
    groups: collective.Groups = field(default_factory=collective.Groups)

    def transform(self) -> Callable[[Weights], Weights] | None:
        """What they get instead of the learner's tensors, None for these. ConfigError: start does not fit quantize."""
        if not self.sglang:
            return None
        file = self.start / "config.json"
        try:
            config = json.loads(file.read_text())
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{file} of the engines' model folder cannot be read: {exc}") from exc
        # Now, and not with the first version.
        for_sglang((), config, self.quantize)
        return lambda weights: for_sglang(weights, config, self.quantize)


def open_publisher(
    carrier: Literal["shm", "zmq", "collective", "disk"],
    directory: Path,
    keep: int,
    *,
    bind: str,
    security: Literal["loopback", "curve", "none"],
    keys: str | None,
    with_delta: bool,
    engines: Engines | None = None,
) -> Publisher:
    """The publisher of a run. directory: for all but zmq. bind, security, keys: for zmq and collective.

    with_delta: for zmq. engines: for collective and disk. ConfigError or TransportError when it cannot serve at `bind`
    or has nothing that the engines could use, WeightSyncError when the folder cannot be had.
    """
    setting = "weights.bind"
    match carrier:
        case "shm":
            return shm.Publisher(directory, keep)
        case "zmq":
            return zmq.Publisher(bind, keep, security, keys=keys, setting=setting, with_delta=with_delta)
    assert engines is not None, f"weights.carrier={carrier} needs to know them"
    transform = engines.transform()
    if carrier == "disk":
        return disk.Publisher(directory, engines.start, keep, transform)
    return collective.Publisher(
        directory, keep, bind, security, keys=keys, setting=setting, groups=engines.groups, transform=transform
    )
