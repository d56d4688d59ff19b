"""An update of a server with the weights that it has: nothing changes but the label, which is put back."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from asyncrl.engines.sglang import bodies
from asyncrl.engines.sglang.client import Client, Refused
from asyncrl.engines.sglang.expects import Needs, needs
from asyncrl.engines.sglang.flags import Facts
from asyncrl.engines.sglang.update import Updater
from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.models.tied import HEAD
from asyncrl.transport.address import is_loopback
from asyncrl.types import Completion, SamplingParams, Version
from asyncrl.weights.collective.client import Groups as Joined
from asyncrl.weights.collective.client import Sending, Source
from asyncrl.weights.collective.publisher import Groups, Publisher
from asyncrl.weights.engine_checksums import SAMPLE_BYTES, expected
from sglang_contract_lib.asking import Asker, new_name
from sglang_contract_lib.report import OK, SKIPPED, WRONG, Report

SENT = Version(0, 0)
WORKERS = 4
"""Responses that run while weights change."""


@dataclass(frozen=True, slots=True)
class How:
    """How weights travel: host is this machine as the server reaches it."""

    host: str
    backend: Literal["gloo", "nccl"]
    timeout_s: float


class _Noted(Source):
    """Remembers the groups that the server was to join."""

    def __init__(self, joined: Joined, source: str, version: Version) -> None:
        super().__init__(joined, source, version)
        self.groups: set[str] = set()

    def broadcast(self, engine: str, ranks: int) -> Sending:
        """As its parent."""
        sending = super().broadcast(engine, ranks)
        self.groups.add(sending.group)
        return sending


async def checksums(client: Client) -> list[dict[str, str]]:
    """Checksums of the server's tensors, of each rank."""
    reply = await client.post(bodies.CHECK, bodies.check_weights(), 10 * client.answer_s, admin=True)
    try:
        return [dict(rank["checksums"]) for rank in reply["ranks"]]
    except (KeyError, TypeError, ValueError) as exc:
        raise EngineError(f"/weights_checker gave no checksums ({exc!r}); SGLang 0.5.23 and later do") from exc


async def check_weights(report: Report, client: Client, facts: Facts, folder: Path, dtype: str, every: bool) -> bool:
    """Whether the server has the weights of the folder, so that sending them changes nothing.

    every: compare all of them, not a sample.
    """
    ranks, stored = await checksums(client), _Stored(folder, dtype)
    names = sorted(set[str].intersection(*map(set, ranks)))
    wanted = expected(stored, names, facts.ranks, sample_bytes=sys.maxsize if every else SAMPLE_BYTES)
    bad = sorted({name for sums in ranks for name, good in wanted.items() if sums[name] not in good})
    if not wanted:
        report.add(SKIPPED, "weights", f"none of {len(names)} tensors can be compared with {folder}")
        return False
    if bad == [HEAD] and HEAD not in stored:
        # A folder with tied embeddings, of which this server has a copy of its own that is never sent here.
        report.add(
            SKIPPED,
            "weights",
            f"{HEAD} is not the embeddings, though {folder} ties them: its log-probs mean nothing before weights are "
            "sent; that asyncrl does, or save the model untied",
        )
        return True
    if bad:
        some = ", ".join(bad[:3])
        report.add(WRONG, "weights", f"{len(bad)} of {len(wanted)} tensors are not those of {folder}: {some}")
        return False
    report.add(OK, "weights", f"{len(wanted)} of {len(names)} tensors compared with {folder}: the same")
    return True


async def check_updates(report: Report, asker: Asker, facts: Facts, folder: Path, dtype: str, how: How) -> None:
    """Send the folder's weights while responses run, under a label of ours; then once more under the old one."""
    client, before = asker.client, await checksums(asker.client)
    wanted = needs(folder, dtype)
    updater = Updater(client, "contract", facts.ranks, how.timeout_s, False, wanted)
    label = new_name()
    with _published(folder, dtype, how) as announced:
        source, ended = _Noted(Joined(), announced, SENT), False
        try:
            done = await _while_sampling(asker, label, updater, source)
            ended = True
            after = await checksums(client)
            changed = sorted({name for a, b in zip(before, after, strict=True) for name in a if a[name] != b.get(name)})
            if changed:
                raise WeightSyncError(f"the same weights were sent, and {len(changed)} tensors changed: {changed[:3]}")
            report.add(OK, "update", f"{len(wanted)} tensors, {how.backend}: all {len(after[0])} checksums as before")
            await _check_label(client, label)
            _check_spans(report, done)
        finally:
            await _put_back(report, client, updater, source, facts.label, ended)


async def _while_sampling(asker: Asker, label: str, updater: Updater, source: Source) -> list[Completion]:
    """What was sampled while the update ran; each reply was checked."""
    # A label may be seen before the update has returned.
    asker.labels = asker.labels | {label: SENT}
    done: list[Completion] = []
    over = asyncio.Event()

    async def sample() -> None:
        while not over.is_set():
            done.append(await asker.sample([1, 0, 1, 0], SamplingParams(1.0, 48, ())))

    tasks = [asyncio.create_task(sample()) for _ in range(WORKERS)]
    try:
        await asyncio.sleep(0.2)
        await updater.update(label, source)
    except BaseException:
        # The server may be paused now, and answers none of them before it is put back.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    over.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return done


async def _check_label(client: Client, label: str) -> None:
    found = (await client.get(bodies.MODEL_INFO)).get("weight_version")
    if found != label:
        raise EngineError(f"after an update to {label!r} weight_version of /model_info is {found!r}")


def _check_spans(report: Report, done: list[Completion]) -> None:
    both = sum(len(one.segments) > 1 for one in done)
    if both:
        report.add(OK, "weight_versions", f"{both} of {len(done)} responses went on across the update, in two spans")
    else:
        report.add(SKIPPED, "weight_versions", f"none of {len(done)} responses ran across the update: run it again")


async def _put_back(report: Report, client: Client, updater: Updater, source: _Noted, label: str, ended: bool) -> None:
    """The old label, an open server and no group; a line when that is not so."""
    try:
        if not ended:  # it may be in the middle of the update
            await updater.reset()
        await updater.update(label, source)
        source.leave("contract")
        for group in source.groups:
            # One that failed may never have been joined.
            with contextlib.suppress(Refused):
                await client.post(bodies.DESTROY_GROUP, bodies.destroy_group(group), admin=True)
        await _check_label(client, label)
    except (EngineError, WeightSyncError) as exc:
        state = "paused, with weights that nobody knows: restart it" if updater.torn else "under another label"
        report.add(WRONG, "restore", f"the server is left {state}: {exc}")
    else:
        report.add(OK, "restore", f"the label is {label!r} again, the group is gone")


@contextlib.contextmanager
def _published(folder: Path, dtype: str, how: How) -> Iterator[str]:
    """A publisher of the folder's weights in this process; its source."""
    host = f"[{how.host}]" if ":" in how.host else how.host
    security: Literal["loopback", "none"] = "loopback" if is_loopback(how.host) else "none"
    groups = Groups(backend=how.backend, device="cuda" if how.backend == "nccl" else "cpu", timeout_s=how.timeout_s)
    with tempfile.TemporaryDirectory(prefix="asyncrl-contract-") as directory:
        publisher = Publisher(directory, 1, f"tcp://{host}:*", security, setting="--host", groups=groups)
        try:
            yield publisher.publish(SENT, _Stored(folder, dtype).items())
        finally:
            publisher.close()


class _Stored(dict[str, Any]):
    """Tensors of a model folder by name, read when they are asked for, floats in the server's dtype."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._wanted: Needs = needs(folder, dtype)
        self._where: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            opened = safe_open(file, framework="pt")
            self._where |= dict.fromkeys(set(opened.keys()) & set(self._wanted), opened)
        super().__init__(dict.fromkeys(self._wanted))

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._where[name].get_tensor(name)
        return tensor.to(getattr(torch, self._wanted[name][0]))

    def items(self) -> Iterator[tuple[str, Tensor]]:  # type: ignore[override]
        return ((name, self[name]) for name in self)
