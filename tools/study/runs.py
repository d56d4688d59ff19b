"""Runs cells: each an `asyncrl run` of its own, several at a time, and none twice. Knows no table.

A finished cell has RUN/study.json, written last. A folder without it is of a run that was cut off, and is removed.
A lock per cell lets several invocations share the work.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from asyncrl.process import role_environment
from study.plan import Cell, Size, arguments

FACTS = "study.json"
LIMIT_S = 1200.0
"""Longest wall time of one cell; then it is stopped, and counts as broken."""
START_S = 60.0
"""Longest wait for the run folder of a cell whose generators are started here."""
LEAVE_S = 20.0
"""How long such generators may take to leave after their run."""
GUESS_S = 30.0
"""CPU seconds of a cell while none was measured."""


def is_finished(folder: Path) -> bool:
    """True when the run there ended well and its facts were written."""
    return (folder / FACTS).is_file() and (folder / "metrics.jsonl").is_file()


def todo(cells: Sequence[Cell], root: Path) -> list[Cell]:
    """The cells that are not finished, in order."""
    return [c for c in cells if not is_finished(root / c.name)]


def cost(root: Path) -> float | None:
    """Mean CPU seconds of the finished cells below root, None without any."""
    found = [json.loads(f.read_text())["cpu_s"] for f in sorted(root.glob(f"*/{FACTS}"))]
    return fmean(found) if found else None


def budget(left: Sequence[Cell], root: Path, jobs: int) -> str:
    """The CPU time that the cells will take, in a sentence."""
    each = cost(root)
    basis = "a guess: none was measured yet" if each is None else "the mean of the finished cells"
    seconds = len(left) * (each or GUESS_S)
    return (
        f"{len(left)} cells to run, {each or GUESS_S:.0f} CPU s each ({basis}): {seconds / 60:.0f} CPU minutes; about "
        f"{seconds / 60 / max(1, jobs):.0f} minutes on {jobs} idle core{'s' if jobs > 1 else ''}"
    )


def say_now(line: str) -> None:
    """Print, also where the output is a file that somebody watches."""
    print(line, flush=True)


def carry_out(cells: Sequence[Cell], root: Path, size: Size, jobs: int, dry_run: bool) -> int:
    """Run the cells, or only say what each would run and what all will take. Returns 1 when one failed, else 0."""
    if not dry_run:
        return int(run_all(cells, root, size, jobs) > 0)
    left = todo(cells, root)
    for cell in cells:
        state = "to run  " if cell in left else "finished"
        print(f"{state} {cell.name}: asyncrl run {' '.join(arguments(cell, size, str(root)))}")
    print(budget(left, root, jobs))
    return 0


def run_all(cells: Sequence[Cell], root: Path, size: Size, jobs: int, say: Callable[[str], None] = say_now) -> int:
    """Run what is not finished, `jobs` at a time; the first one alone, so that the budget is a measured one.

    Returns how many failed. Each cell has at most LIMIT_S.
    """
    root.mkdir(parents=True, exist_ok=True)
    left = todo(cells, root)
    say(f"{len(cells) - len(left)} of {len(cells)} cells are finished. {budget(left, root, jobs)}")
    failed = 0
    if left and cost(root) is None:
        failed += not _one(left.pop(0), root, size, say)
        if left:
            say(f"measured: {budget(left, root, jobs)}")
    waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
    for cell in left:
        waiting.put(cell)
    outcomes: list[bool] = []

    def work() -> None:
        while True:
            try:
                cell = waiting.get_nowait()
            except queue.Empty:
                return
            outcomes.append(_one(cell, root, size, say))

    threads = [threading.Thread(target=work) for _ in range(max(1, jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed + outcomes.count(False)


def _one(cell: Cell, root: Path, size: Size, say: Callable[[str], None]) -> bool:
    """Run one cell; True when it finished, or when another process runs it or has finished it meanwhile."""
    with open(root / f"{cell.name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{cell.name}: another process runs it")
            return True
        return is_finished(root / cell.name) or _run(cell, root, size, say)


def _run(cell: Cell, root: Path, size: Size, say: Callable[[str], None]) -> bool:
    folder = root / cell.name
    if folder.exists():
        shutil.rmtree(folder)
    log = root / f"{cell.name}.log"
    words = arguments(cell, size, str(root))
    load = os.getloadavg()[0]
    started = time.monotonic()
    with open(log, "wb") as out:
        status, cpu_s = _supervised(cell, folder, words, out.fileno())
    wall_s = time.monotonic() - started
    if status == 0 and (folder / "model").is_dir():
        facts = {"cpu_s": cpu_s, "wall_s": wall_s, "load": load, "words": words, "size": size._asdict()}
        (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
        for heavy in ("model", "checkpoints"):
            shutil.rmtree(folder / heavy, ignore_errors=True)
        say(f"{time.strftime('%H:%M:%S')} {cell.name}: {cpu_s:.0f} CPU s, {wall_s:.0f} s, load {load:.1f}")
        return True
    say(f"{cell.name}: status {status} after {wall_s:.0f} s; see {log} and {folder / 'logs'}")
    return False


def _supervised(cell: Cell, folder: Path, words: list[str], out: int) -> tuple[int, float]:
    """Exit status of the run and CPU seconds of all its processes, generators that are started here included."""
    run = _start([sys.executable, "-m", "asyncrl", "run", *words], out, {})
    fleet: list[subprocess.Popen[bytes]] = []
    try:
        if not cell.is_plain:
            fleet.append(_fleet(cell, folder, out, run))
        status, cpu_s = _wait(run, LIMIT_S)
        # They leave when replay says that the run is over.
        return status, cpu_s + sum(_wait(process, LEAVE_S)[1] for process in fleet)
    finally:
        for process in (run, *fleet):
            if process.returncode is None:
                _wait(process, 0.0)


def _fleet(cell: Cell, folder: Path, out: int, run: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """The generator of a cell that needs another engine; waits for the run folder, at most START_S."""
    deadline = time.monotonic() + START_S
    while not (folder / "config.yaml").is_file() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    program = [sys.executable, str(Path(__file__).with_name("generator.py")), str(folder / "config.yaml"), "--id", "g0"]
    told = {"STUDY_PRECISION": cell.precision, "STUDY_FAULT": "noise" if cell.fleet == "faulty" else ""}
    return _start(program, out, told)


def _start(command: list[str], out: int, told: dict[str, str]) -> subprocess.Popen[bytes]:
    env = role_environment(1) | told
    env["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env)


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> tuple[int, float]:
    """Exit status and CPU seconds of a process and all that it waited for; after limit_s SIGTERM, then SIGKILL.

    wait4 and not Popen.wait, for it alone says what the process used.
    """
    deadline = time.monotonic() + limit_s
    signals = [process.terminate, process.kill]
    while True:
        pid, status, used = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, used.ru_utime + used.ru_stime
        if time.monotonic() > deadline and signals:
            signals.pop(0)()
            deadline = time.monotonic() + LEAVE_S
        time.sleep(0.1)
