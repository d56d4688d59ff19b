"""Hosts for ssh on one machine: each a network, mount and host name namespace with an sshd of its own.

The hosts share no file that a run writes: every one has a /dev/shm and a runs folder of its own.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

TOOLS = ("ip", "unshare", "sshd", "ssh", "ssh-keygen")
SBIN = f"{os.environ['PATH']}:/usr/sbin:/sbin"

SSHD = """Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin yes
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
"""

SSH = """Host {name}
    HostName {address}
    User root
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    HostKeyAlias fleet
    LogLevel ERROR
"""


def missing() -> str:
    """Why there can be no such hosts here, or ""."""
    lack = [tool for tool in TOOLS if shutil.which(tool, path=SBIN) is None]
    if lack:
        return f"not installed: {', '.join(lack)} (openssh-server, openssh-client, iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"asyncrl-probe-{os.getpid()}"
    if _run("ip", "netns", "add", probe, check=False).returncode != 0:
        return "this machine makes no network namespaces"
    _run("ip", "netns", "delete", probe)
    return ""


@dataclass
class Host:
    """One namespace and its sshd."""

    name: str
    address: str
    sshd: subprocess.Popen

    def path(self, inside) -> Path:
        """What this host sees at an absolute path."""
        return Path(f"/proc/{self.sshd.pid}/root") / Path(inside).relative_to("/")

    def processes(self) -> list[psutil.Process]:
        """All that run here, but for the sshd that listens."""
        here = os.stat(f"/proc/{self.sshd.pid}/ns/net").st_ino
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            try:
                inside = os.stat(f"/proc/{process.pid}/ns/net").st_ino == here
            except OSError:
                continue
            if inside and process.pid != self.sshd.pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def roles(self, word: str) -> list[psutil.Process]:
        """Processes with this word in their command."""
        return [p for p in self.processes() if word in (p.info["cmdline"] or [])]

    def sessions(self) -> list[psutil.Process]:
        """What a role or a session left running."""
        return [p for p in self.processes() if p.info["cmdline"]]


class Hosts:
    """`count` hosts h0, h1, ... on a bridge that this machine has an address on. private: their own runs folder."""

    def __init__(self, folder: Path, private: Path, count: int) -> None:
        self.folder, self.private = folder, private
        self.tag = f"arl{os.getpid() % 100000}"
        self.net = f"10.213.{os.getpid() % 250}"
        self.hosts: list[Host] = []
        folder.mkdir(mode=0o700, exist_ok=True)
        private.mkdir(parents=True, exist_ok=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        for key in ("host_key", "key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
        (folder / "known_hosts").write_text("fleet " + (folder / "host_key.pub").read_text())
        _run("ip", "link", "add", self.tag, "type", "bridge")
        try:
            _run("ip", "address", "add", f"{self.net}.254/24", "dev", self.tag)
            _run("ip", "link", "set", self.tag, "up")
            for i in range(count):
                self.hosts.append(self._start(i))
            config = [SSH.format(name=h.name, address=h.address, folder=folder) for h in self.hosts]
            (folder / "ssh_config").write_text("".join(config))
            for host in self.hosts:
                self._wait(host)
        except BaseException:
            self.close()
            raise

    @property
    def ssh(self) -> str:
        """The ssh command that knows these hosts."""
        return f"ssh -F {shlex.quote(str(self.folder / 'ssh_config'))}"

    def _start(self, i: int) -> Host:
        name, address, space = f"h{i}", f"{self.net}.{i + 1}", f"{self.tag}-{i}"
        config = self.folder / f"sshd-{i}"
        config.write_text(SSHD.format(address=address, folder=self.folder))
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", f"{self.tag}.{i}", "type", "veth", "peer", "name", "eth0", "netns", space)
        _run("ip", "link", "set", f"{self.tag}.{i}", "master", self.tag, "up")
        for words in (["address", "add", f"{address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
            _run("ip", "-n", space, *words)
        _run("ip", "-n", space, "link", "set", "lo", "up")
        inside = (
            f"mount --make-rprivate / && mount -t tmpfs shm /dev/shm && mount -t tmpfs runs {self.private} "
            f"&& hostname {name} && exec $(command -v sshd) -D -e -f {config}"
        )
        with open(self.folder / f"sshd-{i}.log", "wb") as log:
            sshd = subprocess.Popen(
                ["ip", "netns", "exec", space, "unshare", "--mount", "--uts", "sh", "-c", inside],
                env={**os.environ, "PATH": SBIN}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        return Host(name, address, sshd)

    def _wait(self, host: Host) -> None:
        """Until a command can be run there; at most a minute."""
        deadline = time.monotonic() + 60
        while True:
            done = subprocess.run(
                [*shlex.split(self.ssh), host.name, "true"], capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                return
            log = (self.folder / f"sshd-{host.name[1:]}.log").read_text()
            assert time.monotonic() < deadline and host.sshd.poll() is None, done.stderr + log
            time.sleep(0.2)

    def close(self) -> None:
        """End all that runs on the hosts, and remove them."""
        for host in self.hosts:
            for process in host.processes():
                process.kill()
            host.sshd.send_signal(signal.SIGTERM)
            host.sshd.wait(10)
        for i in range(len(self.hosts)):
            _run("ip", "netns", "delete", f"{self.tag}-{i}", check=False)
        _run("ip", "link", "delete", self.tag, check=False)


def _run(*words: str, check: bool = True) -> subprocess.CompletedProcess:
    done = subprocess.run(
        words, env={**os.environ, "PATH": SBIN}, capture_output=True, text=True, timeout=60, check=False
    )
    assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done
