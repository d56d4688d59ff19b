"""Lines of a contract check and what they add up to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from asyncrl.engines.sglang.client import Refused
from asyncrl.errors import AsyncRLError

OK, MISSING, WRONG, SKIPPED = "ok", "MISSING", "WRONG", "skipped"


class Report:
    """Prints one line per check as it is made."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, str]] = []
        """(status, check, text) of each line."""

    def add(self, status: str, check: str, text: str) -> None:
        """Print a line; text of a server may have several."""
        text = " ".join(text.split())
        self.lines.append((status, check, text))
        print(f"{status:<8} {check:<16} {text}", flush=True)

    @property
    def status(self) -> int:
        """Exit status: 1 when anything is missing or wrong."""
        return int(any(status in (MISSING, WRONG) for status, _, _ in self.lines))

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[None]:
        """An error of a check becomes its line: MISSING for a path that the server does not have, else WRONG."""
        try:
            yield
        except Refused as exc:
            self.add(MISSING if exc.status == 404 else WRONG, name, str(exc))
        except AsyncRLError as exc:
            self.add(WRONG, name, str(exc))
        except TimeoutError as exc:
            self.add(WRONG, name, f"no answer in time {exc}".rstrip())
