"""How a command is run on another host: plain ssh, or a step of a SLURM job. Both carry standard input and output."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

AGENT = ("-m", "asyncrl.remote.agent")


class Reach(Protocol):
    """Makes the local command whose input and output are those of an agent there."""

    def command(self, name: str, host: str) -> list[str]:
        """The command for the role `name` on `host`."""
        ...


@dataclass(frozen=True)
class Ssh:
    """ssh without a terminal and without questions; a silent connection ends after a minute."""

    ssh: Sequence[str]
    directory: str
    python: str

    def command(self, name: str, host: str) -> list[str]:
        """The agent in `directory` there, in place of the shell."""
        options = ["BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=15", "ServerAliveCountMax=4"]
        words = [word for option in options for word in ("-o", option)]
        there = f"cd {shlex.quote(self.directory)} && exec {shlex.quote(self.python)} {' '.join(AGENT)}"
        return [*self.ssh, "-T", *words, host, there]


@dataclass(frozen=True)
class Srun:
    """A step of its own for every role: a node that dies takes only its roles with it."""

    directory: str
    python: str
    env: Mapping[str, str]

    def command(self, name: str, host: str) -> list[str]:
        """Generators in component 0 of the heterogeneous job, replay and the learner in component 1."""
        group = 1 if name in ("replay", "learner") else 0
        words = ["srun", f"--het-group={group}", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap"]
        # A step does not take over --cpus-per-task of its job by itself.
        cpus = self.env.get(f"SLURM_CPUS_PER_TASK_HET_GROUP_{group}")
        words += [f"--cpus-per-task={cpus}"] if cpus else []
        words += ["--no-kill", "--unbuffered", f"--chdir={self.directory}"]
        return [*words, self.python, *AGENT]
