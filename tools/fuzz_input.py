"""What tools/fuzz.py throws: good messages, mutations of them, and connections that break the rules."""

from __future__ import annotations

import random
import socket
import struct
from pathlib import Path

import msgspec
import numpy as np

from asyncrl import wire
from asyncrl.errors import WireError
from asyncrl.types import Group, ModelInfo, Prompt, Segment, Trajectory, Version

Frames = list[bytes]


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (self.file, "w"))


def make_group(rng: random.Random, lease: wire.LeaseMsg | None, model: ModelInfo) -> Frames:
    """A good group of 2 responses, except that E and K are now and then not the announced ones."""
    group_id = lease.group_id if lease is not None else f"0/p{rng.randrange(64)}"
    experts = model.num_experts + (rng.random() < 0.1)
    prompt = Prompt(group_id[2:], np.array([1, 2, 3], np.int32), "t", "a", "s")
    if lease is not None:
        prompt = wire.prompt_from_msg(lease.prompt)
    num_prompt, trajectories = len(prompt.token_ids), []
    for i in range(2):
        n = rng.randint(1, 20)
        counts = np.zeros((1, len(model.layers), experts), np.uint16)
        routes = None
        if rng.random() < 0.3:
            routes = np.zeros(
                (num_prompt - 1 + n, len(model.layers), model.top_k + (rng.random() < 0.1)), model.route_dtype
            )
        trajectories.append(
            Trajectory(
                f"{group_id}#1.{0 if rng.random() < 0.1 else i}", np.arange(n, dtype=np.int32),
                np.full(n, -0.5, np.float32), np.ones(n, bool), (Segment(Version(0, rng.choice([0, 0, 7])), 0, n),),
                float(i), "stop", counts, routes,
            )
        )  # fmt: skip
    group = Group(group_id, prompt, "fuzz", rng.choice([1, 1, 1, 0, 9]), 1.0, tuple(trajectories))
    return [bytes(f) for f in wire.encode_group(group)]


def make_message(rng: random.Random) -> Frames:
    """A good message of a kind that peers send, with odd numbers."""
    number = rng.choice([0, 1, -1, 2**31, 2**40, 2**62, -(2**62)])
    update, epoch = rng.choice([0, number]), rng.choice([0, 0, number])
    made = rng.choice(
        [
            wire.LeaseRequest((0, number), number, number),
            wire.Heartbeat((0, number), {"x": float("nan")}, [(0.0, float("inf"))] * rng.randint(0, 2000)),
            wire.EvalResult("0.0", (0, number), [wire.EvalAnswer("e0", number, False, 1.0, number, "stop")]),
            wire.Failed("0/p1#1", "0/p1", "x" * rng.randint(0, 5000)),
            wire.Take(number, update, rng.choice([0, number]), rng.choice([1, number]), epoch),
            wire.Commit(rng.choice([0, number]), update, "trained", ["0/p1"] * rng.randint(0, 500), 1, number, epoch),
            wire.Published(epoch, update, "nowhere", 1, number),
            wire.Done(update, 1, epoch),
            wire.Ack(["x"], ["y"], number),
            wire.Cancel(["x"]),
            wire.Status(),
            wire.TakeReply(0, True, "", [0], [number], [number]),
        ]
    )
    return [bytes(f) for f in wire.encode(made)]


def make_heartbeat(rng: random.Random) -> Frames:
    """As much as a heartbeat may say, or more."""
    gauges = {f"{i:064d}": float(i) for i in range(64 * rng.choice([1, 1, 1, 2, 800]))}
    return [bytes(f) for f in wire.encode(wire.Heartbeat((0, 0), gauges, [(float(i), i + 1.0) for i in range(512)]))]


def mutate(rng: random.Random, frames: Frames, bomb: bytes) -> Frames:
    """One to four changes of frames."""
    frames = list(frames)
    for _ in range(rng.randint(1, 4)):
        i = rng.randrange(len(frames)) if frames else 0
        change = rng.randrange(11)
        if not frames or change == 0:
            frames.insert(i, rng.randbytes(rng.choice([0, 1, 8, 100, 70_000])))
        elif change == 1:
            del frames[i]
        elif change == 2:
            frames[i] = frames[i][: rng.randint(0, len(frames[i]))]
        elif change == 3 and frames[i]:
            at = rng.randrange(len(frames[i]))
            frames[i] = frames[i][:at] + rng.randbytes(rng.randint(1, 4)) + frames[i][at + 1 :]
        elif change == 4:
            frames[i] = bomb
        elif change == 5:
            frames += [frames[i]] * rng.choice([1, 10, 1000])
        elif change == 6:
            frames[i] = struct.pack(">Q", 2**30) + frames[i]
        elif change == 7:
            rng.shuffle(frames)
        elif change == 8:
            frames[i] = b"\x91" * rng.choice([10, 5000])  # nested arrays
        elif len(frames) > 1:
            frames[1] = mutate_header(rng, frames[1])
    return frames


def mutate_header(rng: random.Random, header: bytes) -> bytes:
    """Replace one value somewhere in a msgpack header."""
    try:
        tree = msgspec.msgpack.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        return header
    at = tree
    while isinstance(at, list) and at:
        i = rng.randrange(len(at))
        if isinstance(at[i], list) and at[i] and rng.random() < 0.8:
            at = at[i]
            continue
        odd = [
            2**30,
            -1,
            2**63 - 1,
            1e308,
            float("nan"),
            "",
            "x" * 3000,
            None,
            [],
            [[]],
            {},
            b"\x80\x04",
            wire.SCHEMA + 1,
        ]
        at[i] = rng.choice(odd)
        break
    return msgspec.msgpack.encode(tree)


def check_decoders(frames: Frames) -> str:
    """What a decoder raised besides WireError, or ""."""
    for decode in (wire.decode, wire.decode_group):
        try:
            decode(frames)
        except WireError:
            continue
        except Exception as exc:
            return f"{decode.__name__}: {type(exc).__name__}: {exc}"
    return ""


# --- raw connections --------------------------------------------------------------------------------

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


def ready() -> bytes:
    """The READY command of a DEALER without a name."""
    body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    return b"\x04" + bytes([len(body)]) + body


def attack(rng: random.Random, raw: socket.socket) -> str:
    """Something that no peer of ours does; its name."""
    kind = rng.choice(["garbage", "half open", "broken handshake", "1 GB", "no end", "many frames"])
    if kind == "garbage":
        raw.sendall(rng.randbytes(rng.randint(1, 3000)))
    elif kind == "broken handshake":
        raw.sendall((GREETING + ready())[: rng.randint(1, 90)] + rng.randbytes(20))
    elif kind != "half open":
        raw.sendall(GREETING + ready())
        if kind == "1 GB":
            raw.sendall(rng.choice([b"\x02", b"\x03"]) + struct.pack(">Q", 2**30) + bytes(10_000))
        else:
            raw.sendall(b"\x01\x00" * rng.choice([1000, 100_000]))
        if kind == "many frames":
            raw.sendall(b"\x00\x00")
    return kind
