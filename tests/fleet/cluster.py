"""A real SLURM on one machine: slurmctld and three slurmd, each under the name of a node of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import psutil

TOOLS = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "squeue", "munged", "munge", "unmunge")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"

CONF = """ClusterName=fleet
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=cred_expire=10
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=20
SchedulerParameters=sched_interval=2,bf_interval=2
NodeName=n[1-3] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def missing() -> str:
    """Why there can be no such cluster here, or ""."""
    lack = [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]
    if lack:
        return f"not installed: {', '.join(lack)} (slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "slurmd and munged need root"


class Cluster:
    """The nodes n1, n2, n3. Every wait is bounded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "state").mkdir(parents=True)
        first = 20000 + os.getpid() % 10000 * 4
        text = CONF.format(
            host=socket.gethostname().split(".")[0], folder=folder, port=first, first=first + 1, last=first + 3
        )
        (folder / "slurm.conf").write_text(text)
        self.env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons: dict[str, subprocess.Popen] = {}
        try:
            self._munge()
            self._start("ctld", "slurmctld", "-D")
            for node in ("n1", "n2", "n3"):
                self.start_node(node)
            self.wait_for(lambda: self.states() == {"idle"}, "nodes are idle", 90)
        except BaseException:
            self.close()
            raise

    def _munge(self) -> None:
        """munged, unless the machine runs one."""

        def answers() -> bool:
            command = ["sh", "-c", "munge -n | unmunge"]
            return subprocess.run(command, env=self.env, capture_output=True, timeout=30, check=False).returncode == 0

        if answers():
            return
        Path("/run/munge").mkdir(exist_ok=True)
        shutil.chown("/run/munge", "munge")
        self._start("munged", "runuser", "-u", "munge", "--", "munged", "--foreground")
        self.wait_for(answers, "munge answers", 30)

    def _start(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as log:
            self.daemons[name] = subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def start_node(self, node: str) -> None:
        """slurmd of one node."""
        (self.folder / f"spool-{node}").mkdir(exist_ok=True)
        self._start(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """As a power cut: SIGKILL to its slurmd, its steps and all that they started."""
        daemon = self.daemons.pop(node)
        daemon.kill()
        daemon.wait(10)
        victims = self.processes(node)
        for process in victims:
            victims = victims + [p for p in process.parents() if "slurmstepd" in p.name() and p not in victims]
        for process in victims:
            process.kill()
        psutil.wait_procs(victims, timeout=10)

    def processes(self, node: str = "") -> list[psutil.Process]:
        """All that jobs of this cluster run, on one node or on all."""
        found = []
        for process in psutil.process_iter(["status"]):
            try:
                env = process.environ()
            except (psutil.Error, OSError):
                continue
            ours = env.get("SLURM_CONF") == self.env["SLURM_CONF"] and env.get("SLURMD_NODENAME")
            if ours and env["SLURMD_NODENAME"] in (node or ours) and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def call(self, *words: str) -> str:
        """Output of a SLURM command, which must succeed."""
        done = subprocess.run(
            words, env=self.env, capture_output=True, text=True, timeout=60, cwd=self.folder, check=False
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout.strip()

    def states(self) -> set[str]:
        """States of the nodes."""
        return set(self.call("sinfo", "-h", "-N", "-o", "%t").split())

    def job(self, job: str) -> dict[str, str]:
        """The first component of a job, as scontrol shows it."""
        words = self.call("scontrol", "show", "job", job).split("\n\n")[0].split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, condition, what: str, timeout_s: float) -> None:
        """Until condition() is true, at most timeout_s."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}: waited {timeout_s} s in vain\n{self.text()}"
            time.sleep(0.2)

    def text(self) -> str:
        """The ends of the daemons' logs."""
        logs = [*self.folder.glob("*.out"), *self.folder.glob("*.log")]
        return "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-1500:]}" for f in sorted(logs))

    def close(self) -> None:
        """End the jobs and the daemons."""
        if "ctld" in self.daemons:
            subprocess.run(["scancel", "--user=root"], env=self.env, capture_output=True, timeout=60, check=False)
        for process in self.processes():
            process.kill()
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(5)
