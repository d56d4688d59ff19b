"""Which role runs where, and what a config needs for it: addresses, keys and a carrier that reach other hosts.

Values in, values out; starts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config import Config, validate
from asyncrl.errors import ConfigError
from asyncrl.transport.address import Address, is_loopback, parse

WILDCARD = "tcp://*:*"


@dataclass(frozen=True)
class Fleet:
    """Host of replay, of the learner, and of every generator: g0, g1, ... A host may have several roles."""

    replay: str
    learner: str
    generators: tuple[str, ...]

    def __post_init__(self) -> None:
        for host in self.hosts().values():
            if not host or host.startswith("-") or host.split() != [host]:
                raise ConfigError(f"{host!r} is not a host")

    def hosts(self) -> dict[str, str]:
        """Host of every role by name."""
        return {"replay": self.replay, "learner": self.learner} | {f"g{i}": h for i, h in enumerate(self.generators)}

    def number_on_host(self, name: str) -> int:
        """How many generators before this one are on the same host: by it they share out GPUs and ports."""
        number = int(name.removeprefix("g"))
        return self.generators[:number].count(self.generators[number])

    @property
    def is_one_host(self) -> bool:
        """True when everything runs on the same host, so that loopback and shared memory do."""
        return len(set(self.hosts().values())) == 1


def repeated(words: Sequence[str]) -> tuple[str, ...]:
    """`HOST` or `HOST*N` to one host per generator. ConfigError for anything else."""
    hosts: list[str] = []
    for word in words:
        host, star, count = word.partition("*")
        if not host or (star and not re.fullmatch(r"[1-9]\d{0,3}", count)):
            raise ConfigError(f"{word!r} is not HOST or HOST*N")
        hosts += [host] * int(count or 1)
    return tuple(hosts)


def from_file(text: str) -> Fleet:
    """A hosts file: lines `replay HOST`, `learner HOST`, `generators HOST[*N]...`; # begins a comment."""
    found: dict[str, list[str]] = {"replay": [], "learner": [], "generators": []}
    for line in text.splitlines():
        role, *hosts = line.partition("#")[0].split() or [""]
        if role and (role not in found or not hosts):
            raise ConfigError(
                f"hosts file: {line!r}; a line is `replay HOST`, `learner HOST`, `generators HOST[*N]...`"
            )
        if role:
            found[role] += hosts
    for role in ("replay", "learner"):
        if len(found[role]) != 1:
            raise ConfigError(f"hosts file: it needs exactly one host for {role}, has {len(found[role])}")
    return Fleet(found["replay"][0], found["learner"][0], repeated(found["generators"]))


def tasks_per_node(text: str) -> list[int]:
    """SLURM's `2(x3),1` to [2, 2, 2, 1]."""
    out: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"SLURM_TASKS_PER_NODE: {text!r} is not like 2(x3),1")
        out += [int(match[1])] * int(match[2] or 1)
    return out


def from_slurm(env: Mapping[str, str], generators: Sequence[str], trainers: Sequence[str]) -> Fleet:
    """Component 0 of a heterogeneous job is a generator per task, component 1 replay and the learner.

    The host names are those of the two components' node lists.
    """
    counts = tasks_per_node(env.get("SLURM_TASKS_PER_NODE_HET_GROUP_0", "1"))
    if len(counts) != len(generators):
        raise ConfigError(f"SLURM gave {len(generators)} generator nodes and task counts for {len(counts)}")
    if len(trainers) != 1:
        raise ConfigError(f"component 1 has {len(trainers)} nodes; the learner's ranks are on one node: --nodes=1")
    placed = tuple(node for node, count in zip(generators, counts, strict=True) for _ in range(count))
    return Fleet(trainers[0], trainers[0], placed)


def reachable(config: Config, fleet: Fleet, made_keys: Path | None) -> Config:
    """The config with what other hosts need, where it still says loopback and shared memory.

    made_keys: a key folder to use when the config has none (None: ConfigError then).
    """
    if fleet.is_one_host:
        return config
    r, w = config.replay, config.weights
    replay: dict[str, Any] = {}
    if is_loopback(parse(r.bind).host):
        replay["bind"] = WILDCARD
    if r.security == "loopback":
        replay["security"] = "curve"
        if r.keys is None and made_keys is None:
            raise ConfigError("replay.security=loopback reaches one host only; set replay.security=curve or none")
        replay["keys"] = r.keys or str(made_keys)
    weights: dict[str, Any] = {}
    if any(host != fleet.learner for host in fleet.generators) and w.carrier != "disk":
        weights["carrier"] = "zmq" if w.carrier == "shm" else w.carrier
        if is_loopback(parse(w.bind).host):
            weights["bind"] = WILDCARD
        if w.security == "loopback":
            weights["security"] = None  # as replay
    return changed(config, replay=replay, weights=weights)


def at_address(config: Config, address: str) -> Config:
    """The config once replay serves at `address`: everybody connects there, and a restarted replay binds its port."""
    bound = Address(parse(config.replay.bind).host, parse(address).port)
    return changed(config, replay={"bind": str(bound), "connect": config.replay.connect or address})


def changed(config: Config, **sections: Mapping[str, Any]) -> Config:
    """The config with some settings replaced, validated again."""
    tree = config.model_dump(mode="json")
    for section, values in sections.items():
        tree[section] |= dict(values)
    return validate(tree)
