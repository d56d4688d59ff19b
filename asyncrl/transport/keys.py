"""The key folder: one server key pair, client key pairs, and the allow-list, one file per key.

    DIR/server.key         secret of the server          DIR/clients/NAME.key   secret of a client
    DIR/server.pub         what clients pin              DIR/clients/NAME.pub   to hand in for the allow-list
    DIR/allowed/NAME.pub   the allow-list

A client's host needs server.pub and its own clients/NAME.key only. Knows files; opens no socket, logs nothing.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from asyncrl.errors import ConfigError

DEFAULT_CLIENT = "client"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_LINE = re.compile(rb"asyncrl-(public|secret) (\S{40})\s*")


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The server's secret and the folder of client public keys that may connect."""

    secret: bytes = field(repr=False)
    allowed: Path


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """A client's own pair and the public key that its server must prove to own."""

    name: str
    public: bytes
    secret: bytes = field(repr=False)
    server: bytes


def new(directory: Path, clients: Sequence[str] = (), server: Path | None = None) -> list[Path]:
    """Make what is missing of a key folder: the server's pair and a pair for every client, allowed at once.

    Without names one client, `client`. With `server`, a file with the public key of a server elsewhere,
    the folder is a client's: no server pair, no allow-list. Returns the files made. Nothing is
    overwritten: ConfigError when a client's key, or all that was asked for, exists.
    """
    names = list(dict.fromkeys(clients)) or [DEFAULT_CLIENT]
    pinned = None if server is None else read(server, "public")
    private = [_private_name(directory, name) for name in names]
    for file in [*private, *(_allowed_name(directory, name) for name in names if pinned is None)]:
        if file.exists():
            raise ConfigError(f"{file} exists and keys are never overwritten; choose another client name")
    if pinned is not None and (directory / "server.pub").exists():
        raise ConfigError(f"{directory / 'server.pub'} exists and keys are never overwritten; choose another folder")
    for folder in (directory, directory / "clients", *([directory / "allowed"] if pinned is None else [])):
        _make_folder(folder)
    made = _new_server(directory) if pinned is None else [_write(directory / "server.pub", "public", pinned)]
    for name, file in zip(names, private, strict=True):
        public, secret = zmq.curve_keypair()
        made += [_write(file, "secret", secret), _write(file.with_suffix(".pub"), "public", public)]
        if pinned is None:
            made.append(_write(_allowed_name(directory, name), "public", public))
    return made


def add(directory: Path, file: Path, name: str | None = None) -> Path:
    """Allow the client whose public key is in `file`, under its file's name or `name`. Returns the new file."""
    target = _allowed_name(directory, name or file.stem)
    if not target.parent.is_dir():
        raise ConfigError(f"{directory} is no server's key folder; `asyncrl keys new {directory}` makes one")
    public = read(file, "public")
    for other, known in listed(directory):
        if known == public:
            raise ConfigError(f"{file} holds the key of {other!r}, which is allowed already")
    if target.exists():
        raise ConfigError(f"{target} exists and keys are never overwritten; give another --name or revoke it first")
    return _write(target, "public", public)


def listed(directory: Path) -> list[tuple[str, bytes]]:
    """Name and public key of every allowed client, by name. ConfigError without the folder, or a key in a file."""
    if not (directory / "allowed").is_dir():
        raise ConfigError(f"{directory} is no key folder of a server; make it with `asyncrl keys new {directory}`")
    return [(file.stem, read(file, "public")) for file in sorted((directory / "allowed").glob("*.pub"))]


def revoke(directory: Path, name: str) -> None:
    """Take a client off the allow-list; its files in `clients` stay. ConfigError if it is not on it."""
    file = _allowed_name(directory, name)
    try:
        file.unlink()
    except FileNotFoundError as exc:
        there = ", ".join(sorted(f.stem for f in file.parent.glob("*.pub"))) or "nobody"
        raise ConfigError(f"{file} does not exist; allowed are: {there}") from exc


def server_keys(directory: str | Path | None, setting: str = "replay.keys") -> ServerKeys:
    """What the serving side needs. ConfigError names `setting` and the remedy."""
    folder = _folder(directory, setting)
    file = folder / "server.key"
    if not file.exists():
        raise ConfigError(
            f"{setting}={str(folder)!r} has no server.key, which the serving side needs; "
            f"make one with `asyncrl keys new {folder}`, or start this role where the key is"
        )
    if not (folder / "allowed").is_dir():
        raise ConfigError(f"{setting}={str(folder)!r} has no folder `allowed`: nobody could connect; make it")
    _refuse_writable(folder / "allowed")
    return ServerKeys(read(file, "secret"), folder / "allowed")


def client_keys(
    security: str, directory: str | Path | None, name: str = DEFAULT_CLIENT, setting: str = "replay.keys"
) -> ClientKeys | None:
    """What a connecting side needs, None unless security is "curve". ConfigError names `setting` and the remedy."""
    if security != "curve":
        return None
    folder = _folder(directory, setting)
    file = _private_name(folder, name)
    if not file.exists():
        section = setting.rpartition(".")[0]
        have = sorted(f.stem for f in (folder / "clients").glob("*.key"))
        remedy = f"set {section}.client to one of: {', '.join(have)}" if have else f"copy it to {file}"
        raise ConfigError(f"{setting}={str(folder)!r} has no key pair of client {name!r}; {remedy}")
    secret = read(file, "secret")
    return ClientKeys(name, zmq.curve_public(secret), secret, read(folder / "server.pub", "public"))


def check(directory: str | Path | None, name: str = DEFAULT_CLIENT, setting: str = "replay.keys") -> None:
    """Read what the folder has for either side; ConfigError when something is wrong or it serves neither."""
    folder = _folder(directory, setting)
    serves = (folder / "server.key").exists()
    if serves:
        server_keys(folder, setting)
    if not serves or (folder / "clients" / f"{name}.key").exists():
        client_keys("curve", folder, name, setting)


def read(file: Path, kind: str) -> bytes:
    """The key in a file, in Z85. ConfigError: no such file, not a key of this kind, or a secret others can read."""
    try:
        with file.open("rb") as stream:
            mode, text = os.fstat(stream.fileno()).st_mode, stream.read(256)
    except OSError as exc:
        raise ConfigError(f"cannot read the {kind} key {str(file)!r}: {exc.strerror or exc}") from exc
    match = _LINE.fullmatch(text)
    if match is None or not _is_key(match[2]):
        raise ConfigError(f"{str(file)!r} does not hold a key that `asyncrl keys` made")
    if match[1].decode() != kind:
        raise ConfigError(f"{str(file)!r} holds a {match[1].decode()} key where a {kind} key belongs")
    if kind == "secret" and mode & 0o077:
        raise ConfigError(f"the secret key {str(file)!r} can be read by other users; chmod 600 {file}")
    return match[2]


def _folder(directory: str | Path | None, setting: str) -> Path:
    if directory is None:
        section = setting.rpartition(".")[0]
        raise ConfigError(
            f"{section}.security=curve needs {setting}; make a folder with `asyncrl keys new DIR` and set {setting}=DIR"
        )
    if not zmq.has("curve"):
        raise ConfigError("this libzmq was built without CURVE; install the pyzmq wheel from the package index")
    folder = Path(directory)
    if not folder.is_dir():
        raise ConfigError(f"{setting}={str(folder)!r} is no folder; make it with `asyncrl keys new {folder}`")
    _refuse_writable(folder)
    return folder


def _refuse_writable(folder: Path) -> None:
    """Who can write there can let himself in."""
    if folder.stat().st_mode & 0o022:
        raise ConfigError(f"the key folder {str(folder)!r} can be changed by other users; chmod 700 {folder}")


def _new_server(directory: Path) -> list[Path]:
    if (directory / "server.key").exists():
        return []
    public, secret = zmq.curve_keypair()
    # The public part first: it is the one that an older server would have left behind.
    return [
        _write(directory / "server.pub", "public", public),
        _write(directory / "server.key", "secret", secret),
    ]


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder") from None
        _refuse_writable(folder)
    except OSError as exc:
        raise ConfigError(f"cannot make the key folder {folder}: {exc.strerror or exc}") from exc


def _write(file: Path, kind: str, key: bytes) -> Path:
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as exc:
        raise ConfigError(f"{file} exists and keys are never overwritten") from exc
    except OSError as exc:
        raise ConfigError(f"cannot write {file}: {exc.strerror or exc}") from exc
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(f"asyncrl-{kind} ".encode() + key + b"\n")
    return file


def _private_name(directory: Path, name: str) -> Path:
    return directory / "clients" / f"{_checked(name)}.key"


def _allowed_name(directory: Path, name: str) -> Path:
    return directory / "allowed" / f"{_checked(name)}.pub"


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"client name {name!r}: use at most 100 letters, digits and . _ -, . or - not first")
    return name


def _is_key(text: bytes) -> bool:
    try:
        return len(z85.decode(text)) == 32
    except (KeyError, ValueError, struct.error):
        return False
