"""Publishing in the background: the learner goes on, announces what is complete, and waits only where it must."""

import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from asyncrl.errors import TrainingError, WeightSyncError
from asyncrl.learner.publishing import Due, Publishing
from asyncrl.learner.shard import World
from asyncrl.types import Version
from asyncrl.weights.shm import Publisher, read

WORLD = World(0, 1, torch.device("cpu"))


class Gated:
    """A publisher whose versions are complete when the test says so; `failures` of them fail first."""

    def __init__(self, failures=0):
        self.gate, self.failures, self.published = threading.Event(), failures, []
        self.counters = Counter()

    def publish(self, version, weights):
        assert self.gate.wait(30)
        if self.failures:
            self.failures -= 1
            raise WeightSyncError(f"version {version} not published: the disk is full")
        self.published.append((version, {name: float(tensor.sum()) for name, tensor in weights}))
        return f"source of {version}"

    def close(self):
        self.gate.set()


@pytest.fixture
def model():
    return SimpleNamespace(model=torch.nn.Linear(2, 2, bias=False))


class Learner:
    """Steps through updates and publishes. told: what replay heard."""

    def __init__(self, model, publisher, timeout_s=30.0, answer_s=0.0, **due):
        self.model, self.answer_s, self.told = model, answer_s, []
        self.publishing = Publishing(publisher, WORLD, Due(**due), timeout_s, self.tell)

    def tell(self, version, source, batches):
        assert batches == version.update
        time.sleep(self.answer_s)
        self.told.append((version, source))

    def publish(self, update, num_batches=1, final=False):
        self.publishing.publish_if_due(self.model, Version(0, update), update, num_batches, final)


def open_gate_soon(publisher):
    timer = threading.Timer(0.2, publisher.gate.set)
    timer.start()
    return timer


def test_the_first_version_is_waited_for_and_later_ones_are_not(model):
    publisher = Gated()
    made = Learner(model, publisher, sync_every=2, max_lag=4)
    timer = open_gate_soon(publisher)
    made.publish(0)
    timer.join()
    assert made.told == [(Version(0, 0), "source of 0.0")]
    publisher.gate.clear()
    for update in (1, 2, 3):
        made.publish(update)
    assert (made.publishing.published, made.publishing.pending, len(made.told)) == (0, Version(0, 2), 1)
    publisher.gate.set()
    assert made.publishing.announce(30.0)
    assert not made.publishing.announce(0.0)  # once
    assert made.told[1:] == [(Version(0, 2), "source of 0.2")]
    publisher.gate.clear()
    made.publish(4)
    assert (made.publishing.published, made.publishing.pending) == (2, Version(0, 4))
    publisher.gate.set()
    made.publishing.close()


def test_what_is_published_is_the_copy_of_its_moment(model):
    publisher = Gated()
    made = Learner(model, publisher, sync_every=1, max_lag=4)
    with torch.no_grad():
        model.model.weight.fill_(1.0)
        publisher.gate.set()
        made.publish(0)
        publisher.gate.clear()
        model.model.weight.fill_(2.0)
        made.publish(1)
        model.model.weight.fill_(3.0)  # the next optimizer step
    publisher.gate.set()
    assert made.publishing.announce(30.0)
    assert publisher.published == [(Version(0, 0), {"weight": 4.0}), (Version(0, 1), {"weight": 8.0})]


def test_a_version_that_the_next_take_needs_is_waited_for(model):
    """On policy the take at update 1 can use version 1 only: it is announced before the take is asked for."""
    publisher = Gated()
    made = Learner(model, publisher, sync_every=1, max_lag=0)
    for update in (0, 1):
        publisher.gate.clear()
        timer = open_gate_soon(publisher)
        made.publish(update)
        timer.join()
        assert made.told[-1] == (Version(0, update), f"source of 0.{update}")
        assert made.publishing.published == update


def test_a_slow_version_is_waited_for_before_the_lag_bound_and_the_next_one_follows(model):
    publisher = Gated()
    publisher.gate.set()
    made = Learner(model, publisher, sync_every=1, max_lag=2)
    made.publish(0)
    publisher.gate.clear()
    for update in (1, 2):
        made.publish(update)
    assert made.publishing.pending == Version(0, 1)  # 2 is not begun while 1 is being written
    timer = open_gate_soon(publisher)
    made.publish(3)
    timer.join()
    made.publishing.announce(30.0)
    assert [v for v, _ in made.told] == [Version(0, 0), Version(0, 1), Version(0, 3)]


@pytest.mark.parametrize(("update", "published", "num_batches", "is_needed"), [
    (0, -1, 1, True),
    (4, 2, 1, False), (6, 2, 1, False), (7, 2, 1, True),
    # The last batch of a take of 4 is used at update 4 + 3.
    (4, 2, 4, True), (4, 3, 4, False),
])  # fmt: skip
def test_when_a_take_needs_another_version(update, published, num_batches, is_needed):
    assert Due(2, 4).needed(update, published, num_batches) is is_needed


def test_a_failed_version_is_published_anew_with_the_next_update(model, caplog):
    publisher = Gated()
    publisher.gate.set()
    made = Learner(model, publisher, sync_every=2, max_lag=4)
    made.publish(0)
    publisher.failures = 1
    made.publish(2)
    assert not made.publishing.announce(30.0)
    made.publish(3)
    made.publishing.announce(30.0)
    assert [v for v, _ in made.told] == [Version(0, 0), Version(0, 3)]
    assert "version 0.2 was not published" in caplog.text and "the disk is full" in caplog.text


def test_versions_that_keep_failing_end_the_run_at_the_lag_bound(model):
    publisher = Gated()
    publisher.gate.set()
    made = Learner(model, publisher, sync_every=1, max_lag=2)
    made.publish(0)
    publisher.failures = 100
    with pytest.raises(TrainingError, match="no version could be published since update 0"):
        for update in range(1, 10):
            made.publish(update)
            made.publishing.announce(30.0)
    assert update == 3


def test_a_version_that_is_never_written_ends_the_run_with_its_cause(model):
    made = Learner(model, Gated(), timeout_s=0.5, sync_every=1, max_lag=1)
    with pytest.raises(TrainingError, match=r"version 0\.0 was not written within 0\.5 s"):
        made.publish(0)
    made.publishing.close()


def test_the_final_version_is_waited_for(model):
    publisher = Gated()
    publisher.gate.set()
    made = Learner(model, publisher, sync_every=4, max_lag=4)
    made.publish(0)
    publisher.gate.clear()
    made.publish(3)
    timer = open_gate_soon(publisher)
    made.publish(3, final=True)
    timer.join()
    assert made.publishing.published == 3
    assert made.told[-1] == (Version(0, 3), "source of 0.3")


def test_a_reader_gets_what_the_announcement_names(model, tmp_path):
    publisher = Publisher(tmp_path / "weights")
    made = Learner(model, publisher, sync_every=1, max_lag=1)
    made.publish(0)
    ((version, source),) = made.told
    assert torch.equal(read(source, version)["weight"], model.model.weight)
    made.publishing.close()
    assert not publisher.directory.exists()


def test_every_wait_for_a_version_counts(model):
    """Also one before a take that needs it, although nothing new is begun then."""
    publisher = Gated()
    publisher.gate.set()
    made = Learner(model, publisher, answer_s=0.1, sync_every=2, max_lag=2)
    made.publish(0)
    assert made.publishing.sync_s >= 0.1
    publisher.gate.clear()
    made.publish(2)
    made.publishing.sync_s = 0.0
    publisher.gate.set()
    made.publish(3)
    assert (made.publishing.published, made.publishing.pending) == (2, None)
    assert made.publishing.sync_s >= 0.1
    publisher.gate.clear()
    made.publish(4)
    made.publishing.sync_s = 0.0
    publisher.gate.set()
    while made.publishing.unannounced:
        made.publishing.announce_soon()
    assert made.publishing.sync_s >= 0.1
