"""The first failure that replay knows of, for the console of `asyncrl run`: one line, once. Asks in a thread."""

from __future__ import annotations

import threading
from pathlib import Path

from asyncrl.errors import ConfigError, NoAnswer, TransportError
from asyncrl.generator.failures import visible
from asyncrl.watch.client import Operator, find

EACH_S = 2.0
"""From one look to the next, and the longest wait for an answer."""


class FirstFailure:
    """Asks the replay of a run folder until it knows a failure. A context manager; leaving ends the thread."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._told = run_dir, False
        self._found = ""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, name="first-failure", daemon=True)

    def __enter__(self) -> FirstFailure:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(2 * EACH_S)

    def news(self) -> str:
        """The line, once; "" before and after. Waits for nothing."""
        if not self._found or self._told:
            return ""
        self._told = True
        return f"first failure: {self._found} (asyncrl status {self._run_dir})"

    def _look(self) -> None:
        try:
            with Operator(find(str(self._run_dir))) as operator:
                while not self._found and not self._end.wait(EACH_S):
                    try:
                        failure = str(operator.status(EACH_S).get("first_failure") or "")
                    except NoAnswer:
                        continue
                    self._found = f"generator {visible(failure)}" if failure else ""
        except (ConfigError, TransportError):
            return  # without keys, or at the end of the run: a line less on the console
