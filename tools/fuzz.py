"""Throws malformed input at the decoders and at a real replay process, for a given time.

    python tools/fuzz.py --minutes 5 --seed 0 [--keep FOLDER]

Messages are mutations of good ones (cut frames, wrong byte counts, absurd lengths, foreign schema, pickles, duplicate
ids, another E or K than announced), sent by DEALER peers; generators join under ever new names, with heartbeats as
large as they may be and larger; besides, raw connections speak broken ZMTP, announce frames
of 1 GB, never finish a message or never finish a handshake, and with --curve clients show keys that nobody allowed.
Meanwhile a good peer asks for Status every second. It fails when a decoder raises anything but WireError, when
replay dies, does not answer within --patience seconds, or holds more than --memory MB above its start, or when a
pickle was run. What made a decoder fail is kept in --keep, one file of msgpack frames each: make it a test of
tests/test_wire.py.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import pickle
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
from fuzz_input import Bomb, Frames, attack, check_decoders, make_group, make_heartbeat, make_message, mutate

from asyncrl import wire
from asyncrl.config import Config, validate
from asyncrl.errors import TransportError
from asyncrl.models.describe import describe
from asyncrl.replay.server import run
from asyncrl.transport import keys
from asyncrl.transport.address import parse
from asyncrl.transport.keys import ClientKeys
from asyncrl.transport.rendezvous import wait_for_address
from asyncrl.transport.sockets import Client

# --- the run ----------------------------------------------------------------------------------------


class Target:
    """A replay process, and a good peer that watches it."""

    def __init__(self, folder: Path, curve: bool) -> None:
        model = write_model(folder / "model")
        replay: dict[str, object] = {}
        self.pair: ClientKeys | None = None
        if curve:
            keys.new(folder / "keys", ["client"])
            keys.new(folder / "outside", ["evil"], folder / "keys" / "server.pub")
            replay = {"security": "curve", "keys": str(folder / "keys")}
            self.pair = keys.client_keys("curve", folder / "keys", "client")
            self.evil = keys.client_keys("curve", folder / "outside", "evil")
        self.config: Config = validate(
            {
                "run": {"dir": str(folder), "name": "r"},
                "model": {"path": str(model)},
                "task": {"train_size": 64, "eval_size": 8, "max_terms": 4},
                "sampling": {"max_new_tokens": 32},
                "algorithm": {"groups_per_update": 4, "group_size": 2},
                "replay": replay,
            }
        )
        self.model = describe(str(model))
        spawn = multiprocessing.get_context("spawn")
        self.process = spawn.Process(target=run, args=(self.config, self.config.run_dir), daemon=True)
        self.process.start()
        self.address = wait_for_address(self.config.run_dir / "replay.address", 120.0)
        self.watch = Client(self.address, b"watch", self.pair)
        self.slowest = 0.0

    def status(self, patience_s: float) -> dict[str, int]:
        """Ask for Status; the counters. RuntimeError when replay died or says nothing for patience_s."""
        started = time.monotonic()
        self.watch.send(wire.encode(wire.Status()))
        while (frames := self.watch.recv(0.5)) is None:
            if not self.process.is_alive():
                raise RuntimeError(f"replay ended with status {self.process.exitcode}")
            if time.monotonic() - started > patience_s:
                raise RuntimeError(f"replay did not answer within {patience_s:g} s")
        self.slowest = max(self.slowest, time.monotonic() - started)
        reply = wire.decode(frames)
        assert isinstance(reply, wire.StatusReply)
        return dict(reply.state["counters"])

    def rss_mb(self) -> float:
        """Resident memory of replay."""
        return float(psutil.Process(self.process.pid).memory_info().rss) / 2**20

    def close(self) -> None:
        """End the process."""
        self.watch.leave()
        self.process.kill()
        self.process.join(10)


def write_model(folder: Path) -> Path:
    """A model folder without weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    characters = ["<eos>", *"0123456789+-=*()., ?abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ:\n"]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": len(characters), "eos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    return folder


class Fuzzer:
    """One run of `seconds`; `failures` says what went wrong."""

    def __init__(self, seed: int, folder: Path, keep: Path, curve: bool) -> None:
        self.rng, self.keep, self.curve = random.Random(seed), keep, curve
        self.sent: Counter[str] = Counter()
        self.failures: list[str] = []
        self.bombed = folder / "pickle-was-run"
        self.bomb = pickle.dumps(Bomb(self.bombed))
        self.target = Target(folder, curve)
        self.raws: list[socket.socket] = []
        self.client: Client | None = None
        self.leases: list[wire.LeaseMsg] = []
        self.late_at = 0.0

    def run(self, seconds: float, patience_s: float, memory_mb: float, say: Callable[[str], None]) -> bool:
        """True when nothing went wrong."""
        self.late_at = time.monotonic() + 0.7 * seconds
        self.introduce("learner").leave()
        self.target.status(patience_s)
        base, peak, counters = self.target.rss_mb(), 0.0, {}
        end, asked = time.monotonic() + seconds, time.monotonic()
        try:
            while time.monotonic() < end and not self.failures:
                self.step()
                if time.monotonic() - asked > 1.0:
                    asked = time.monotonic()
                    counters = self.target.status(patience_s)
                    peak = max(peak, self.target.rss_mb() - base)
                    if peak > memory_mb:
                        self.failures.append(f"replay grew by {peak:.0f} MB, the limit is {memory_mb:g}")
            counters = self.target.status(patience_s)
        except RuntimeError as exc:
            self.failures.append(str(exc))
        finally:
            self.close()
        if self.bombed.exists():
            self.failures.append("a pickle was run")
        say(f"sent: {dict(sorted(self.sent.items()))}")
        say(f"counted by replay: {counters}")
        say(f"replay grew by at most {peak:.0f} MB; slowest answer to Status {self.target.slowest:.2f} s")
        return not self.failures

    def step(self) -> None:
        """One malformed thing."""
        rng = self.rng
        lease = rng.choice(self.leases) if self.leases and rng.random() < 0.8 else None
        good = make_message(rng) if rng.random() < 0.4 else make_group(rng, lease, self.target.model)
        frames = mutate(rng, good, self.bomb) if rng.random() < 0.8 else good
        wrong = check_decoders(frames)
        if wrong:
            self.keep.mkdir(parents=True, exist_ok=True)
            file = self.keep / f"{rng.getrandbits(32):08x}.msgpack"
            file.write_bytes(msgspec.msgpack.encode(frames))
            self.failures.append(f"{wrong} (kept in {file})")
        chance = rng.random()
        if chance < 0.02:
            self.connect_raw()
        elif chance < 0.04:
            self.crowd()
        else:
            self.send(frames)

    def connect_raw(self) -> None:
        """One broken connection; some stay open."""
        with contextlib.suppress(OSError):
            raw = socket.create_connection(("127.0.0.1", parse(self.target.address).port or 0), 5)
            self.raws.append(raw)
            self.sent[attack(self.rng, raw)] += 1
        while len(self.raws) > 300 or (self.raws and self.rng.random() < 0.3):
            self.raws.pop(self.rng.randrange(len(self.raws))).close()

    def crowd(self) -> None:
        """One generator more, with much to say of itself."""
        client = self.introduce("generator", f"{self.rng.getrandbits(64):0256x}")
        with contextlib.suppress(TransportError):
            client.send(make_heartbeat(self.rng), 2.0)
        client.leave()
        self.sent["names"] += 1

    def send(self, frames: Frames) -> None:
        """Frames from a generator, a learner, a stranger, or a client with a wrong key."""
        if self.client is None or self.rng.random() < 0.005:
            if self.client is not None:
                self.client.leave()
            self.client = self.connect()
        with contextlib.suppress(TransportError):
            self.client.send(frames or [b""], 2.0)
            self.sent["messages"] += 1
        while (reply := self.client.recv(0)) is not None:
            message = wire.decode(reply)
            if isinstance(message, wire.Leases):
                self.leases = [*self.leases, *message.leases][-64:]

    def connect(self) -> Client:
        """A peer that said Hello, or not."""
        # What a learner says moves the clock for good: not before the end is near.
        last = "learner" if time.monotonic() > self.late_at else "stranger"
        role = self.rng.choice(["generator", "generator", last, "wrong key" if self.curve else "stranger"])
        self.sent[role] += 1
        if role == "wrong key":
            client = Client(self.target.address, b"evil", self.target.evil)
            client.send([b"msg", b"x"])
            client.leave()
            role = "stranger"
        return self.introduce(role)

    def introduce(self, role: str, name: str = "") -> Client:
        """A peer of a role, or a stranger. name: by default its role's."""
        client = Client(self.target.address, f"{role}-{self.rng.getrandbits(24)}".encode(), self.target.pair)
        m = self.target.model
        name = name or ("learner-0" if role == "learner" else role)
        if role != "stranger":
            settings = self.target.config.shared_settings()
            client.send(
                wire.encode(
                    wire.Hello(
                        wire.SCHEMA, role, name, str(self.rng.random()), list(m.layers), m.num_experts, m.top_k,
                        m.vocab_size, m.fingerprint, (0, 0), settings=settings,
                    )
                )
            )  # fmt: skip
        if role == "learner":
            client.send(wire.encode(wire.Published(0, 0, "nowhere", 1)))
        if role == "generator":
            client.send(wire.encode(wire.LeaseRequest((0, 0), 4)))
        return client

    def close(self) -> None:
        """End everything."""
        for raw in self.raws:
            raw.close()
        if self.client is not None:
            self.client.leave()
        self.target.close()


def main() -> None:
    """Fuzz; exit status 1 when something went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=20.0)
    parser.add_argument("--memory", type=float, default=400.0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"))
    arguments = parser.parse_args()
    failed = False
    for curve in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o700)
            fuzzer = Fuzzer(arguments.seed + curve, Path(folder), arguments.keep, curve)
            print(f"seed {arguments.seed + curve}, {'keys' if curve else 'plain'}", flush=True)
            good = fuzzer.run(arguments.minutes * 30, arguments.patience, arguments.memory, print)
            failed = failed or not good
            print("\n".join(fuzzer.failures) or "nothing went wrong", flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
