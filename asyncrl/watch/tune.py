"""`asyncrl tune`: sends changes of live settings to replay and prints what became of them."""

from __future__ import annotations

import getpass
import json
import socket
import sys
import uuid
from collections.abc import Sequence

from rich.console import Console

from asyncrl import wire
from asyncrl.config import read_overrides
from asyncrl.errors import ConfigError, NoAnswer, TransportError
from asyncrl.watch.client import ANSWER_S, Operator, Target
from asyncrl.watch.show import is_over, tell_folder

MAX_VALUE = 4096
"""Characters of a value as JSON that are sent."""


def tune(target: Target, changes: Sequence[str], undo: int = 0, timeout_s: float = ANSWER_S) -> int:
    """Ask for changes, each key=value, or for the last `undo` ones to be taken back; neither: print what is tuned.

    Waits for the answer at most timeout_s. Returns 0, 2 when they are refused, 1 when the run is over; ConfigError
    for what is no key=value, TransportError when replay cannot be reached or does not answer.
    """
    if changes and undo:
        raise ConfigError("give either KEY=VALUE or --undo, not both")
    _values(changes)  # what is wrong with them is said first
    if is_over(target):
        return tell_folder(target, False, Console(stderr=True))
    with Operator(target) as operator:
        reply = request(operator, changes, undo, timeout_s)
    print(reply.text if reply.ok else f"refused: {reply.text}", file=sys.stdout if reply.ok else sys.stderr)
    return 0 if reply.ok else 2


def request(operator: Operator, changes: Sequence[str], undo: int = 0, timeout_s: float = ANSWER_S) -> wire.TuneReply:
    """One Tune, done once however often it is sent, and its answer; waits for it at most timeout_s."""
    values = _values(changes)
    key = uuid.uuid4().hex
    try:
        return operator.ask(
            wire.Tune(values, undo, _me(), key), wire.TuneReply, timeout_s, lambda reply: reply.key == key
        )
    except NoAnswer as exc:
        if not (values or undo) or not operator.address:
            raise
        raise TransportError(f"{exc}; it may have been done all the same: `asyncrl tune RUN` prints it") from exc


def num_undone(arguments: Sequence[str]) -> int:
    """How many changes `--undo` takes back, by the arguments beside it: one without any. ConfigError for others."""
    if len(arguments) > 1 or not all(a.isascii() and a.isdigit() and int(a) > 0 for a in arguments):
        raise ConfigError(f"--undo takes one number from 1 on, not {' '.join(arguments)!r}; KEY=VALUE goes without it")
    return int(arguments[0]) if arguments else 1


def _values(changes: Sequence[str]) -> dict[str, str]:
    """key=value words as JSON by key. ConfigError for a key that is there twice, or a value that no message holds."""
    keys = [c.partition("=")[0].strip() for c in changes]
    if twice := sorted({k for k in keys if keys.count(k) > 1}):
        raise ConfigError(f"{twice[0]} is given more than once; give it one value")
    values = {key: json.dumps(value) for key, value in read_overrides(changes).items()}
    for key, text in values.items():
        if len(text) > MAX_VALUE:
            raise ConfigError(f"{key}: a value of {len(text)} characters is too long; at most {MAX_VALUE}")
    return values


def _me() -> str:
    """Who asks, for the run's log."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        return socket.gethostname()
