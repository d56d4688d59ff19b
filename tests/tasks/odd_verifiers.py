"""Verifiers that misbehave, by source name; anything else is scored as usual. Runs in pool workers."""

from __future__ import annotations

import os
import signal
import sys
import time

from asyncrl.tasks import rewards
from asyncrl.tasks.rewards import Verdict


def prepare(source: str) -> None:
    if source == "slow to load":
        time.sleep(4.0)


def score(source: str, text: str, answer: str) -> float | Verdict:
    if source == "loop":
        while True:
            pass
    if source == "power":  # one C call that holds the interpreter lock: no signal, thread or alarm gets in
        return float(9 ** (9 ** int(text)) == answer)
    if source == "eval":
        return float(eval(text) == answer)
    if source == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if source == "nan":
        return float("nan")
    if source == "two":
        return 2.0
    if source == "alarm":  # what math-verify does; raises ValueError off the main thread
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return 1.0
    if source == "hoard":
        kept = []
        while True:
            kept.append(bytearray(2**24))
    if source == "pid":
        time.sleep(float(text))
        return Verdict(1.0, {"pid": float(os.getpid())}, "x" * 300)
    if source == "exit":
        sys.exit(3)
    if source == "half":
        raise ValueError("no character: \ud83d")
    if source == "late":
        raise TimeoutError("it took too long")
    if source == "slow to load":
        return 1.0
    if source == "chatty":
        print("noise", file=sys.stdout, flush=True)
        return 1.0
    if source == "heavy":
        return float(any(name in sys.modules for name in ("torch", "numpy", "transformers", "reasoning_gym")))
    return rewards.judge(source, text, answer)
