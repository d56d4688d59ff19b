"""B52: 20 prompts, 2 a batch, up to 6 ahead: whoever is killed, every prompt of the data epoch is trained once.

The learner's checkpoint is older than what it committed, as one is that was written while updates ran: the pair of it
and replay's snapshot is made consistent by the journal, which says of every group the batch that used it up.
"""

from __future__ import annotations

import json

import pytest

from asyncrl import wire
from asyncrl.replay.journal import surviving
from tests.replay import net as module
from tests.replay.net import Net
from tests.replay.support import make_prompts

PROMPTS, BATCH = 20, 2
ALL = sorted(f"0/p{i}" for i in range(PROMPTS))


class Side:
    """Replay, a generator that samples under the version it holds, and a learner; each can be killed."""

    def __init__(self, folder, **limits):
        self.folder, self.limits = folder, limits
        self.version, self.update, self.batches, self.takes = (0, 0), 0, 0, 0
        self.late = []
        self.boots = 0
        self.replay = None
        self.begin_replay()
        self.begin_learner()
        self.begin_generator()

    def begin_replay(self):
        if self.replay is not None:
            self.replay.close()
        self.replay = Net(self.folder, groups_per_update=BATCH, max_lag=2, **self.limits)

    def begin_learner(self):
        self.boots += 1
        self.learner = self.replay.peer("learner-0", "learner", identity=f"learner-{self.boots}")
        self.publish()

    def begin_generator(self, boot="g"):
        self.generator = self.replay.peer("g0", hello=False, identity=f"g0-{self.boots}-{boot}")
        self.generator.hello(boot=boot, held=self.version)

    def ask(self, peer, message, kind):
        peer.send(message)
        while not isinstance(found := peer.recv(), tuple) or not isinstance(found[0], kind):
            pass
        return found

    def publish(self):
        version = (self.version[0], self.update)
        self.ask(self.learner, wire.Published(*version, f"/w/{version}", batches=self.batches), wire.Ack)
        self.version = version

    def lease(self, want):
        return self.ask(self.generator, wire.LeaseRequest(self.version, want, 0), wire.Leases)[0].leases

    def deliver(self, lease, version=None):
        responses = tuple(
            module.response(f"{lease.lease_id}.{i}", [((version or self.version)[1], 4)], float(i), self.version[0])
            for i in range(2)
        )
        prompt = wire.prompt_from_msg(lease.prompt)
        group = module.Group(lease.group_id, prompt, "g0", lease.attempt, 1.0, responses)
        self.ask(self.generator, wire.encode_group(group), wire.Ack)

    def sample(self):
        for lease in self.lease(8):
            self.deliver(lease)

    def train(self, until):
        while self.update < until:
            self.sample()
            reply, buffers = self.ask(
                self.learner, wire.Take(self.takes, self.update, 0, 1, self.version[0]), wire.TakeReply
            )
            if not reply.ready:
                self.replay.now += 1
                continue
            ids, at = [], 0
            for count in reply.frames:
                ids.append(wire.decode_group([b"group", *buffers[at : at + count]]).group_id)
                at += count
            commit = wire.Commit(self.takes, self.update + 1, "trained", ids, 0, self.batches, self.version[0])
            self.ask(self.learner, commit, wire.Ack)
            self.takes, self.update, self.batches = self.takes + 1, self.update + 1, self.batches + 1
            self.publish()

    def resume(self, checkpoint):
        """The learner goes on from that update, as the next run epoch."""
        self.update, self.batches, self.takes = checkpoint, checkpoint, 0
        self.version = (self.version[0] + 1, checkpoint)
        self.begin_learner()

    def trained(self):
        lines = [json.loads(x) for x in (self.folder / "committed.jsonl").read_text().splitlines()]
        return [c["group_id"] for c in surviving(lines)], len([x for x in lines if "group_id" in x])


@pytest.fixture
def side(tmp_path, monkeypatch):
    monkeypatch.setattr(
        module, "make_prompts", lambda n, prefix="p": make_prompts(PROMPTS if prefix == "p" else n, prefix)
    )
    made = []

    def make(**limits):
        made.append(Side(tmp_path, **limits))
        return made[-1]

    yield make
    for one in made:
        one.replay.close()


@pytest.mark.parametrize("survivors", ["replay and generator", "generator", "nobody"])
@pytest.mark.parametrize("checkpoint", [3, 0])
def test_after_a_kill_every_prompt_is_trained_once(side, survivors, checkpoint):
    run = side()
    run.train(3)
    # A checkpoint of update 3 is begun here; updates 3 and 4 are committed before it is complete (or it never is).
    run.train(5)
    run.sample()
    if survivors != "replay and generator":
        run.begin_replay()
    if survivors == "nobody":
        run.replay.now += 60
    run.resume(checkpoint)
    run.begin_generator("g" if survivors != "nobody" else "another")
    run.train(PROMPTS // BATCH)
    kept, lines = run.trained()
    assert sorted(kept) == ALL
    assert lines == PROMPTS + BATCH * (5 - checkpoint)


@pytest.mark.parametrize("survivors", ["replay and generator", "nobody"])
def test_two_groups_that_are_dropped_as_stale_are_counted_and_not_repeated(side, survivors):
    run = side(on_evict="drop")
    late = run.lease(2)
    run.train(4)
    for lease in late:
        run.deliver(lease, (0, 0))
    assert run.replay.counters["stale"] == 2, run.replay.counters
    run.train(5)
    if survivors == "nobody":
        run.begin_replay()
        run.replay.now += 60
    run.resume(3)
    run.begin_generator("g" if survivors != "nobody" else "another")
    run.train((PROMPTS - 2) // BATCH)
    dropped = sorted(x.group_id for x in late)
    assert sorted([*run.trained()[0], *dropped]) == ALL
    # They stay dropped: what comes next is of the next data epoch.
    assert {x.group_id.partition("/")[0] for x in run.lease(4)} == {"1"}


@pytest.mark.parametrize("survivors", ["replay and generator", "nobody"])
def test_a_checkpoint_at_the_exact_end_of_a_data_epoch_does_not_repeat_it(side, survivors):
    run = side()
    run.train(PROMPTS // BATCH)
    if survivors == "nobody":
        run.begin_replay()
        run.replay.now += 60
    run.resume(PROMPTS // BATCH)
    run.begin_generator("g" if survivors != "nobody" else "another")
    run.train(2 * PROMPTS // BATCH)
    kept, lines = run.trained()
    assert sorted(kept[:PROMPTS]) == ALL and lines == 2 * PROMPTS
    assert sorted(kept[PROMPTS:]) == [x.replace("0/", "1/") for x in ALL]
