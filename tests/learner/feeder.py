"""A generator of synthetic groups: the real messages over a real socket, without a model."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np

from asyncrl import wire
from asyncrl.transport.rendezvous import wait_for_address
from asyncrl.transport.sockets import Client
from asyncrl.types import Group, Version
from tests.learner.groups import make_trajectory

ASK_S = 0.1


class Feeder(threading.Thread):
    """Leases prompts and answers each at once, until replay says stop or `end`. `error`: what ended it otherwise."""

    def __init__(self, config, info):
        super().__init__(daemon=True)
        self.config, self.info, self.held = config, info, None
        self.sent: list[tuple[str, Version]] = []
        """Group id and version of every group, in order; a prompt that was leased again comes again."""
        self.error: BaseException | None = None
        self._over = threading.Event()
        self.start()

    def run(self):
        try:
            self._serve()
        except BaseException as exc:
            self.error = exc

    def end(self):
        self._over.set()
        self.join(20)
        assert self.error is None, self.error

    def _serve(self):
        client = Client(wait_for_address(self.config.run_dir / "replay.address", 60.0), b"feeder")
        i, asked = self.info, 0.0
        hello = wire.Hello(
            wire.SCHEMA, "generator", "feeder", "b", list(i.layers), i.num_experts, i.top_k, i.vocab_size,
            i.fingerprint, settings=self.config.shared_settings(),
        )  # fmt: skip
        client.send(wire.encode(hello))
        while not self._over.is_set():
            frames = client.recv(0.02)
            if frames is not None and not self._hear(wire.decode(frames), client):
                break
            if self.held is not None and time.monotonic() - asked > ASK_S:
                asked = time.monotonic()
                client.send(wire.encode(wire.Heartbeat(tuple(self.held), {})))
                client.send(wire.encode(wire.LeaseRequest(tuple(self.held), 4)))
        client.leave()

    def _hear(self, message, client):
        match message:
            case wire.Welcome(newest=newest) if newest is not None:
                self.held = Version(*newest[:2])
            case wire.NewVersion(epoch=epoch, update=update):
                self.held = Version(epoch, update)
            case wire.Leases(leases=leases):
                for lease in leases:
                    self.sent.append((lease.group_id, self.held))
                    client.send(wire.encode_group(self._group(lease)))
            case wire.Refused(reason=reason):
                raise AssertionError(reason)
        return not isinstance(message, wire.Stop)

    def _group(self, lease):
        rng = np.random.default_rng([len(lease.group_id), lease.attempt, *lease.group_id.encode()])
        prompt, size = wire.prompt_from_msg(lease.prompt), self.config.algorithm.group_size
        made = []
        for j in range(size):
            versions = ((self.held.update, 10**9),)
            t = make_trajectory(
                f"{lease.lease_id}.{j}", len(prompt.token_ids), int(rng.integers(1, 12)), self.info, rng, versions,
                reward=float(j % 2), full_routes=False,
            )  # fmt: skip
            segments = tuple(s._replace(version=self.held) for s in t.segments)
            made.append(replace(t, segments=segments))
        return Group(lease.group_id, prompt, "feeder", lease.attempt, 1.0, tuple(made), 0.1)
