"""`asyncrl status`: one look at a run, or one after the other. Asks replay; where it is gone, reads the run folder."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live

from asyncrl.errors import NoAnswer
from asyncrl.transport.address import is_loopback, parse
from asyncrl.transport.rendezvous import address_at
from asyncrl.watch import folder
from asyncrl.watch.client import Operator, Target
from asyncrl.watch.derive import derive
from asyncrl.watch.status import duration, screen
from asyncrl.watch.view import render

RATES_S = 10.0
"""Rates of `--watch` are means over at most this long."""

GONE_S = 5.0
"""Replay may be silent this long, while it is started again, before the run folder is asked what became of the run."""

ROWS = 24
"""Lines that a screen has besides those of generators."""


class Looks:
    """The last looks at one run, and what is derived of the newest."""

    def __init__(self, target: Target) -> None:
        self._target, self._past = target, deque[dict[str, Any]]()
        self.address, self.taken = "", 0.0
        self.derived: dict[str, Any] = {}

    @property
    def last(self) -> dict[str, Any] | None:
        """The newest state, None before the first."""
        return self._past[-1] if self._past else None

    def add(self, state: dict[str, Any], address: str) -> None:
        """A new look. Rates are since the oldest one of the last RATES_S."""
        while self._past and state["time"] - self._past[0]["time"] > RATES_S and len(self._past) > 1:
            self._past.popleft()
        before = self._past[0] if self._past else None
        self._past.append(state)
        self.address, self.taken, self.derived = address, time.monotonic(), derive(state, before)

    def as_json(self) -> dict[str, Any]:
        """What --json prints of the newest look."""
        return {"run": self._target.name, "address": self.address, "state": trimmed(self.last), "derived": self.derived}

    def draw(self, console: Console, notes: tuple[str, ...] = (), fits: bool = False) -> Any:
        """The newest look as a screen. fits: with no more generators than the terminal has room for."""
        assert self.last is not None
        whole = screen(self._target.name, self.address, self.last, self.derived)
        return render(whole, notes, max(3, console.size.height - ROWS) if fits else None)


def show(target: Target, as_json: bool, timeout_s: float, console: Console | None = None) -> int:
    """Print one look. Waits for replay at most timeout_s. 0, or 1 when there is nothing to ask."""
    console = console or Console()
    if is_over(target):
        return tell_folder(target, as_json, console)
    looks = Looks(target)
    with Operator(target) as operator:
        try:
            state = operator.status(timeout_s)
        except NoAnswer as exc:
            if target.run_dir is None:
                raise
            return tell_folder(target, as_json, console, str(exc) if operator.address else "")
        looks.add(state, operator.address)
    if as_json:
        _print_json(looks.as_json(), console)
    else:
        console.print(looks.draw(console))
    return 0


def watch(target: Target, as_json: bool, interval_s: float, console: Console | None = None) -> int:
    """Print a look every interval_s until Ctrl-C (0), or until the run is over: 0 when it finished, else 1.

    Outlives replay: says when it is silent, and goes on where it is started again. On a terminal the screen is drawn
    anew in place; else one follows the other, as one line each with as_json.
    """
    console = console or Console()
    looks, silent_since = Looks(target), None
    live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
    in_place = console.is_terminal and not as_json
    with Operator(target) as operator:
        try:
            if in_place:
                live.start()
            while True:
                asked, note = time.monotonic(), ""
                try:
                    looks.add(operator.status(max(1.0, interval_s)), operator.address)
                    silent_since = None
                except NoAnswer as exc:
                    operator.close()  # what was asked waits there for a replay that comes back, and is out of date
                    silent_since = silent_since if silent_since is not None else asked
                    silence = time.monotonic() - silent_since
                    if (status := _end(target, looks, silence)) is not None:
                        live.stop()
                        if target.run_dir is not None:
                            tell_folder(target, as_json, console)
                        return status
                    note = f"replay is silent for {duration(silence)}; still asking. {_last(looks)}"
                    note = note if looks.last is not None else f"{note}\n{exc}"
                _put(looks, note, console, live if in_place else None, as_json)
                time.sleep(max(0.0, interval_s - (time.monotonic() - asked)))
        except KeyboardInterrupt:
            return 0
        finally:
            live.stop()


def _last(looks: Looks) -> str:
    if looks.last is None:
        return "It was not heard yet."
    return f"Below is the look of {duration(time.monotonic() - looks.taken)} ago."


def _put(looks: Looks, note: str, console: Console, live: Live | None, as_json: bool) -> None:
    """One look on the screen, or the note that there is none."""
    if as_json:
        _print_json({"silent": note} if note else looks.as_json(), console)
        return
    drawn = looks.draw(console, (note,) * bool(note), fits=live is not None) if looks.last is not None else note
    if live is not None:
        live.update(drawn, refresh=True)
    else:
        console.print(drawn, "", sep="\n")


def _end(target: Target, looks: Looks, silence_s: float) -> int | None:
    """The exit status when the run is over, None while it may go on."""
    last = looks.last or {}
    if silence_s > GONE_S and (last.get("finished") or last.get("failure")):
        return int(bool(last.get("failure")))
    if target.run_dir is None or not _only_here(target) or (silence_s <= GONE_S and address_at(target.place)):
        return None
    report = folder.look(target.run_dir)
    return None if report.running else int(not report.finished)


def is_over(target: Target) -> bool:
    """True when nobody can be there: no address, or one of this machine, and no process holds the run folder."""
    return target.run_dir is not None and _only_here(target) and not folder.look(target.run_dir).running


def _only_here(target: Target) -> bool:
    """True when replay has no address, or one that only this machine can reach."""
    address = address_at(target.place)
    return not address or is_loopback(parse(address).host)


def tell_folder(target: Target, as_json: bool, console: Console, why: str = "") -> int:
    """Say what the run folder says. 1: there is nobody to ask."""
    assert target.run_dir is not None
    report = folder.look(target.run_dir)
    if as_json:
        said = {"run": target.name, "address": "", "state": None, "derived": None, "folder": report._asdict()}
        _print_json(said | ({"silent": why} if why else {}), console)
        return 1
    for line in (*([why] if why else []), *folder.words(target.run_dir, report)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 1


def trimmed(state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A state without the intervals in which generators were busy: hundreds for each."""
    if state is None:
        return None
    fleet = {n: {k: v for k, v in g.items() if k != "busy"} for n, g in state["generators"].items()}
    return {**state, "generators": fleet}


def _print_json(value: Mapping[str, Any], console: Console) -> None:
    console.out(json.dumps(_finite(value), default=str), highlight=False)


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
