"""Small prompts, groups and queues with literal versions and rewards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl import wire
from asyncrl.arrays import Buffer
from asyncrl.replay.intake import Put
from asyncrl.replay.ledger import Lease
from asyncrl.replay.limits import Limits
from asyncrl.replay.queue import ReplayQueue
from asyncrl.types import Group, ModelInfo, Prompt, Segment, Trajectory, Version

MODEL = ModelInfo((0, 1), 8, 2, 32, "f00d")

# One response as (update of the version, number of tokens) per segment.
Parts = Sequence[tuple[int, int]]


def make_prompts(count: int, prefix: str = "p") -> list[Prompt]:
    """Of the data sources s0, s1 and s2 in turn."""
    return [
        Prompt(f"{prefix}{i}", np.array([1, 2, i % 30], np.int32), f"{i}+1=", f"{i + 1}", "sum", f"s{i % 3}")
        for i in range(count)
    ]


def response(name: str, parts: Parts, reward: float = 0.0, epoch: int = 0, finish: str = "stop") -> Trajectory:
    segments, at = [], 0
    for update, tokens in parts:
        segments.append(Segment(Version(epoch, update), at, at + tokens))
        at += tokens
    return Trajectory(
        name,
        np.arange(at, dtype=np.int32) % MODEL.vocab_size,
        np.full(at, -0.5, np.float32),
        np.ones(at, bool),
        tuple(segments),
        reward,
        finish,
        np.zeros((len(segments), 2, 8), np.uint16),
    )


def answer(
    lease: Lease, *responses: Parts, rewards: Sequence[float] = (), generator: str = "", epoch: int = 0
) -> Group:
    """The group of a lease by its generator; by default two responses of 4 tokens under the leased version."""
    generator = generator or lease.generator_id
    parts = responses or ([(lease.version.update, 4)], [(lease.version.update, 4)])
    rewards = rewards or [float(i == 0) for i in range(len(parts))]
    trajectories = tuple(
        response(f"{lease.lease_id}.{i}", p, r, epoch) for i, (p, r) in enumerate(zip(parts, rewards, strict=True))
    )
    return Group(lease.group_id, lease.prompt, generator, lease.attempt, 1.0, trajectories, 0.5)


def make_queue(num_prompts: int = 1000, **changes: object) -> ReplayQueue:
    """A queue with 4 groups of 2 responses per update, max_lag 2, that has version 0.0."""
    values: dict[str, object] = {"groups_per_update": 4, "group_size": 2, "max_lag": 2} | changes
    queue = ReplayQueue(make_prompts(num_prompts), Limits(**values), MODEL)  # type: ignore[arg-type]
    queue.publish(Version(0, 0))
    return queue


def deliver(queue: ReplayQueue, group: Group, payload: Sequence[Buffer], sender: str) -> Put:
    """Put a group as replay does that received it, with a payload of the test's choice."""
    return queue.put(wire.read_group(wire.encode_group(group)), payload, sender)


def fill(queue: ReplayQueue, count: int, *responses: Parts, held: int = 0, now: float = 0.0) -> list[str]:
    """Lease and answer `count` groups under version 0.`held`; their ids."""
    grant = queue.lease("g0", Version(0, held), count, now)
    assert len(grant.leases) == count, grant.idle
    for lease in grant.leases:
        assert deliver(queue, answer(lease, *responses), [b"group", b"head", b"x" * 100], "g0").status == "admitted"
    return [lease.group_id for lease in grant.leases]


def train(queue: ReplayQueue, take_id: int, update: int) -> list[str]:
    """Take, commit every batch as trained; the ids in order."""
    take = queue.take(take_id, update)
    assert take is not None, queue.waiting
    for m, ids in enumerate(take.batches):
        queue.commit(take_id, update + m + 1, "trained", ids)
    return [i for ids in take.batches for i in ids]
