"""One rank's part of a checkpoint: what is saved, its pieces on the host, and the safetensors file that it writes.

The file is laid out as torch.distributed.checkpoint's HuggingFaceStorageWriter lays it out (offsets of every piece in
the header), so that HuggingFaceStorageReader puts the pieces of all ranks together on any number of ranks. It is
written here because DCP's writer needs collectives, which a thread must not run beside those of the training.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor, Replicate

from asyncrl.learner.shard import Policy, World
from asyncrl.learner.step import Updater
from asyncrl.models import finite
from asyncrl.models.write import WORDS, header_bytes

BLOCK = 2**24
"""Bytes that are written or read at once."""

WRITING, WRITTEN, FAILED = 2.0, 0.0, 1.0
"""States of a job; the maximum over ranks is the state of the checkpoint."""


def saved_tensors(policy: Policy, updater: Updater) -> dict[str, Tensor]:
    """What must be saved, by name; reading into these tensors is loading (but for the steps)."""
    return dict(_model(policy)) | updater.state()


def _model(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    shared = {name for name, _ in policy.named_parameters(remove_duplicate=False)}
    for name, parameter in policy.named_parameters():
        yield f"model.{name}", parameter.detach()
    for name, tensor in policy.state_dict().items():
        if name not in shared:
            yield f"model.{name}", tensor


def is_finite(tensor: Tensor) -> bool:
    """False when this rank's part holds NaN or infinity."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return finite.is_finite(local)


class Piece(NamedTuple):
    """A rectangle of a tensor: where it begins in the whole one, and its values, contiguous on the CPU."""

    offsets: tuple[int, ...]
    values: Tensor


def random_states(world: World) -> dict[str, Piece]:
    """The states of this rank's random generators, uint8. No update of today's learner draws from them."""
    states = {"random.cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state(world.device)
    return {f"{name}.{world.rank}": Piece((0,), state) for name, state in states.items()}


def set_random_states(file: Path, world: World) -> None:
    """Put this rank's random generators into the states that its file holds, if it does."""
    with safe_open(file, framework="pt") as data:
        held = {name: data.get_tensor(name) for name in data.keys() if name.startswith("random.")}  # noqa: SIM118
    if (state := held.get(f"random.cpu.{world.rank}")) is not None:
        torch.set_rng_state(state)
    if (state := held.get(f"random.cuda.{world.rank}")) is not None and world.device.type == "cuda":
        torch.cuda.set_rng_state(state, world.device)


def file_of(world: World) -> str:
    """Name of this rank's file."""
    return f"shard-{world.rank:05d}.safetensors"


def pieces(tensors: Mapping[str, Tensor], world: World) -> dict[str, Piece]:
    """Copies of what this rank has to write. What every rank has is written by one. No collective."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=world.is_writer)
    out: dict[str, Piece] = {}
    for item in planner.create_local_plan().items:
        name, chunk = item.index.fqn, item.tensor_data
        assert chunk is not None, f"{name} is no tensor"
        if not _is_writer(tensors[name], world) or 0 in chunk.chunk.sizes:
            continue
        assert name not in out, f"{name} lies in two pieces on one rank"
        local = planner.resolve_data(item)
        assert isinstance(local, Tensor)
        values = local.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        out[name] = Piece(tuple(chunk.chunk.offsets), values)
    return out


def _is_writer(tensor: Tensor, world: World) -> bool:
    if not isinstance(tensor, DTensor):
        return world.is_writer
    place = tensor.device_mesh.get_coordinate()
    return place is not None and not any(
        at for at, p in zip(place, tensor.placements, strict=True) if isinstance(p, Replicate)
    )


def write(file: Path, parts: Mapping[str, Piece]) -> str:
    """Write a safetensors file and flush it to the disk; its xxh3. Raises OSError, for example on a full disk."""
    # Wide elements first, so that each lies at a multiple of its size.
    ordered = sorted(parts.items(), key=lambda p: (-p[1].values.element_size(), p[0]))
    digest = xxhash.xxh3_64()
    with file.open("wb") as out:
        for part in _bytes(ordered):
            for start in range(0, len(part), BLOCK):
                block = part[start : start + BLOCK]
                out.write(block)
                digest.update(block)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _bytes(parts: list[tuple[str, Piece]]) -> Iterator[memoryview]:
    """Header, then the values of every piece."""
    header: dict[str, object] = {}
    end = 0
    for name, (_, values) in parts:
        start, end = end, end + values.nbytes
        header[name] = {"dtype": WORDS[values.dtype], "shape": list(values.shape), "data_offsets": [start, end]}
    info = {name: {"saved_offsets": list(offsets)} for name, (offsets, _) in parts}
    header["__metadata__"] = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}
    yield memoryview(header_bytes(header))
    for _, (_, values) in parts:
        yield values.reshape(-1).view(torch.uint8).numpy().data


class Job:
    """A rank's file being written by a thread. digest: its hash once it is complete; why: what went wrong, or ""."""

    def __init__(self, file: Path, parts: Mapping[str, Piece]) -> None:
        self.file, self.digest, self.why, self.seconds = file, "", "", 0.0
        self.num_bytes = sum(p.values.nbytes for p in parts.values())
        self._done = threading.Event()
        # A daemon: a disk that hangs must not keep the process.
        threading.Thread(target=self._run, args=(parts,), name="checkpoint", daemon=True).start()

    def _run(self, parts: Mapping[str, Piece]) -> None:
        started = time.monotonic()
        try:
            # Rank 0 made the folder; over a network this rank may see it later.
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.digest = write(self.file, parts)
        except OSError as exc:
            self.why = str(exc)
        finally:
            self.why = self.why or ("" if self.digest else "the thread that wrote it ended; its error is in the log")
            self.seconds = time.monotonic() - started
            self._done.set()

    @property
    def state(self) -> float:
        """WRITING, WRITTEN or FAILED."""
        if not self._done.is_set():
            return WRITING
        return FAILED if self.why else WRITTEN

    def wait(self, timeout_s: float) -> bool:
        """True when it is over; waits at most timeout_s."""
        return self._done.wait(timeout_s)


def hashing(folder: Path, names: Iterable[str], found: dict[str, str]) -> Iterator[bool]:
    """Hash files into `found`, one block at a step; True while it goes on. Raises OSError."""
    for name in names:
        digest = xxhash.xxh3_64()
        with (folder / name).open("rb") as data:
            while block := data.read(BLOCK):
                digest.update(block)
                yield True
        found[name] = digest.hexdigest()
