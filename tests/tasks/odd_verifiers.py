"""Verifiers that misbehave, by source name; anything else is scored as usual. Runs in pool workers."""

from __future__ import annotations

import os
import signal
import sys

from asyncrl.tasks import rewards


def score(source: str, text: str, answer: str) -> float:
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
    if source == "chatty":
        print("noise", file=sys.stdout, flush=True)
        return 1.0
    if source == "heavy":
        return float(any(name in sys.modules for name in ("torch", "numpy", "transformers", "reasoning_gym")))
    return rewards.score(source, text, answer)
