"""An operator's connection to the replay of a running job: one request, one answer, no Hello.

Finds replay by the run folder (its replay.address, and the keys that its config.yaml names) or by an address and a
key folder. Knows no command.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from asyncrl import wire
from asyncrl.config import load_config
from asyncrl.errors import ConfigError, NoAnswer, TransportError, WireError
from asyncrl.transport.keys import DEFAULT_CLIENT, ClientKeys, client_keys
from asyncrl.transport.rendezvous import Place, address_at
from asyncrl.transport.sockets import Client

RESEND_S = 2.0
"""A request without an answer for this long is sent again."""

ANSWER_S = 15.0
"""Longest wait for an answer, unless the caller says otherwise."""

_LISTEN_S = 0.1

Answer = TypeVar("Answer", bound=wire.Message)


class Target(NamedTuple):
    """Where a replay is, by what name people know it, and the keys for it."""

    place: Place
    name: str
    keys: ClientKeys | None
    run_dir: Path | None
    """The run folder, when the run was named by it."""


def find(run: str, keys: Path | None = None, client: str | None = None) -> Target:
    """The replay of a run folder, or at `tcp://HOST:PORT` with a key folder.

    keys and client override what the run's config says. Opens nothing. ConfigError names what is missing.
    """
    if "://" in run:
        # The folder that the user named, not a setting of a config.
        return Target(run, run, _keys("curve" if keys else "none", keys, client or DEFAULT_CLIENT, "--keys"), None)
    folder = Path(run)
    file = folder / "config.yaml"
    if not file.is_file():
        raise ConfigError(
            f"{run!r} is no run folder (it has no config.yaml); give the folder that `asyncrl run` printed, or "
            "tcp://HOST:PORT of a run elsewhere, with --keys DIR"
        )
    r = load_config(file).replay
    secrets = _keys("curve" if keys else r.security, keys or r.keys, client or r.client, "replay.keys")
    return Target(r.connect or folder / "replay.address", str(folder), secrets, folder)


def _keys(security: str, folder: Path | str | None, client: str, setting: str) -> ClientKeys | None:
    return client_keys(security, folder, client, "replay.keys" if setting != "--keys" else setting)


class Operator:
    """Asks one replay. Use from one thread; a context manager.

    `address` is that of the last request, "" before any. Raises TransportError with the remedy.
    """

    def __init__(self, target: Target) -> None:
        self.target, self.address = target, ""
        self._identity = f"operator-{uuid.uuid4().hex[:12]}".encode()
        self._socket: Client | None = None

    def ask(
        self,
        request: wire.Message,
        answer: type[Answer],
        timeout_s: float = ANSWER_S,
        mine: Callable[[Answer], bool] = lambda _: True,
    ) -> Answer:
        """Send until an answer of that kind arrives which is `mine`; waits at most timeout_s, NoAnswer after.

        A request is sent again every RESEND_S, also to a replay that was started again at another address: it must
        be one that may be done twice, or carry a key. Refused raises TransportError with the reason.
        """
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            socket = self._connection()
            if socket is None:
                time.sleep(min(left, _LISTEN_S))
                continue
            socket.send(wire.encode(request), max(0.1, left))
            resend = time.monotonic() + min(RESEND_S, left)
            while (wait := resend - time.monotonic()) > 0:
                frames = socket.recv(min(wait, _LISTEN_S))
                message = self._read(frames) if frames is not None else None
                if isinstance(message, answer) and mine(message):
                    return message
        raise NoAnswer(self._silence(type(request).__name__, timeout_s))

    def status(self, timeout_s: float = ANSWER_S) -> dict[str, object]:
        """The state of replay (asyncrl.replay.state); waits at most timeout_s."""
        return self.ask(wire.Status(), wire.StatusReply, timeout_s).state

    def _connection(self) -> Client | None:
        """The socket to where replay is now, None while it has no address."""
        address = address_at(self.target.place)
        if address and (address != self.address or self._socket is None):
            self.close()
            self.address, self._socket = address, Client(address, self._identity, self.target.keys)
        return self._socket

    def _read(self, frames: list[wire.Buffer]) -> wire.Message:
        try:
            message = wire.decode(frames)
        except WireError as exc:
            raise TransportError(
                f"replay at {self.address} does not speak wire schema {wire.SCHEMA} ({exc}); use the asyncrl of the run"
            ) from exc
        if isinstance(message, wire.Refused):
            raise TransportError(f"replay at {self.address} refused: {message.reason}")
        return message

    def _silence(self, request: str, timeout_s: float) -> str:
        t = self.target
        if not self.address:
            return (
                f"{t.place} names no address: the run {t.name} is not running (any more), or was started elsewhere; "
                "start it with `asyncrl run`, or give tcp://HOST:PORT"
            )
        keys = f"this key ({t.keys.name!r}) is not on its allow-list" if t.keys else "it wants keys: --keys DIR"
        return (
            f"replay at {self.address} did not answer {request} within {timeout_s:g} s: is the run {t.name} alive and "
            f"reachable from here? With replay.security=curve, perhaps {keys}"
        )

    def close(self) -> None:
        """Close the socket. Waits for nothing."""
        if self._socket is not None:
            self._socket.leave()
            self._socket = None

    def __enter__(self) -> Operator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
