"""Ranks as processes of their own: started, waited for, and none left."""

import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from asyncrl.process import role_environment

ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    """codes: exit status of each rank, negative for a signal. said: what they wrote, one after the other."""

    codes: list[int]
    said: str


def run_ranks(script, size, folder, *args, limit_s=550.0):
    """`script NUMBER ARG...` in `size` processes, which write to files in `folder`; killed after limit_s."""
    logs = [folder / f"rank-{time.monotonic_ns()}-{number}.log" for number in range(size)]
    ranks = []
    deadline = time.monotonic() + limit_s
    try:
        for number, log in enumerate(logs):
            with log.open("wb") as out:
                command = [sys.executable, str(script), str(number), *map(str, args)]
                env = {**role_environment(1), "PYTHONPATH": str(ROOT)}
                ranks.append(
                    subprocess.Popen(
                        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
                    )
                )
        codes = [rank.wait(max(0.1, deadline - time.monotonic())) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(30)
    return Ended(codes, "".join(log.read_text(errors="replace") for log in logs))


def free_port():
    """A port of this host that nobody has now.

    Below those that the system gives to whoever asks for any: another test could be given it before it is used.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(10_000, first if first > 12_000 else 60_000)
    for port in random.SystemRandom().sample(ports, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("100 ports are taken")
