"""A connection that breaks with answers on the way: real generator, replay and sockets, a bad network between them."""

from __future__ import annotations

import time

import pytest
from chaos_lib.proxy import Network, Proxy

from asyncrl import wire
from asyncrl.replay.evals import Evaluations
from asyncrl.replay.ledger import State
from asyncrl.replay.limits import Limits
from asyncrl.replay.queue import ReplayQueue
from asyncrl.replay.service import ReplayServer
from asyncrl.transport.sockets import Server
from asyncrl.types import Version
from tests.replay.support import MODEL, make_prompts
from tests.replay.test_process import make_config
from tests.replay.test_restart_process import Role

GIVE_UP_S = 120.0
LEASE_S = 3600.0
"""No lease ends here: what is healed is healed by words."""


class Rig:
    """Replay in the test's thread, one generator behind a proxy."""

    def __init__(self, tmp_path):
        limits = Limits(groups_per_update=1, group_size=2, max_lag=0, lease_timeout_s=LEASE_S, max_attempts=2)
        self.queue = ReplayQueue(make_prompts(100), limits, MODEL)
        self.server = ReplayServer(
            self.queue, Evaluations([], self.queue.tally, every=0), Server("tcp://127.0.0.1:*"), heartbeat_timeout_s=1e6
        )
        self.queue.publish(Version(0, 0))
        self.network = Network()
        self.proxy = Proxy(self.network, int(self.server.socket.address.rpartition(":")[2]))
        self.role = Role(make_config(tmp_path), MODEL, "g0", f"tcp://127.0.0.1:{self.proxy.port}")

    def until(self, condition):
        deadline = time.monotonic() + GIVE_UP_S
        while not condition():
            assert time.monotonic() < deadline and self.role.error is None
            self.server.step(0.02)

    @property
    def outbox(self):
        return self.role.generator.outbox if self.role.generator is not None else ()

    def admitted(self, attempt):
        queued = self.queue.ledger.of_state(State.QUEUED)
        return bool(queued) and queued[0].digest.attempt == attempt and not self.outbox.unconfirmed

    def break_off(self):
        """What replay said since the way down was held never arrives."""
        self.server.step(0.02)
        self.proxy.reset()
        self.proxy.calm()

    def close(self):
        self.until(lambda: (self.server._tell("g0", wire.Stop("over")), not self.role.is_alive())[1])
        self.proxy.close()
        self.network.close()
        self.server.socket.close()


@pytest.fixture
def rig(tmp_path):
    made = Rig(tmp_path)
    yield made
    made.close()


def test_a_reset_between_an_eviction_and_the_next_lease_costs_neither_the_prompt_nor_an_attempt(rig):
    rig.until(lambda: rig.outbox and rig.admitted(1))
    (entry,) = rig.queue.ledger.of_state(State.QUEUED)
    rig.proxy.down.held_until = time.monotonic() + LEASE_S
    rig.queue._exits.evict(entry, "overtaken")
    # The word of it and the next Leases are on their way when the connection breaks.
    rig.until(lambda: entry.state is State.LEASED)
    assert entry.attempt == 2 and entry.lease.seq > 0
    rig.break_off()
    rig.until(lambda: rig.admitted(2))
    assert rig.outbox.lease_ids == [f"{entry.group_id}#2"]
    assert rig.queue.tally.counters["lost_lease"] == 1 and not rig.queue.tally.dropped


def test_a_generator_lets_go_of_a_trained_group_though_the_word_of_it_was_lost(rig):
    rig.until(lambda: rig.outbox and rig.admitted(1))
    (group_id,) = rig.queue.take(0, 0).batches[0]
    rig.proxy.down.held_until = time.monotonic() + LEASE_S
    rig.queue.commit(0, 1, "trained", [group_id])
    rig.break_off()
    rig.until(lambda: len(rig.outbox) == 0)
