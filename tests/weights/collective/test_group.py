"""What can be made of torch.distributed here, and where it listens."""

import pytest
import torch

from asyncrl.errors import ConfigError, WeightSyncError
from asyncrl.weights.collective import group
from asyncrl.weights.collective.publisher import Groups, Publisher


def test_the_interface_of_an_address():
    assert group.interface_of("127.0.0.1") == "lo"
    assert group.interface_of("127.0.0.53") == "lo"
    with pytest.raises(WeightSyncError, match=r"203\.0\.113\.1 of weights\.bind"):
        group.interface_of("203.0.113.1")


def test_gloo_can_be_made_and_nccl_not_without_a_gpu():
    group.check("gloo")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"set weights\.backend=gloo"):
            group.check("nccl")


def test_a_torch_without_the_helper_is_refused(monkeypatch):
    monkeypatch.setattr(group, "_new_process_group_helper", None)
    with pytest.raises(ConfigError, match=r"use the torch of constraints\.txt, or weights\.carrier=disk"):
        group.check("gloo")


def test_auto_follows_the_device():
    assert Groups(device="cpu").resolved == "gloo"
    assert Groups(device="cuda:3").resolved == "nccl"
    assert Groups(backend="gloo", device="cuda:3").resolved == "gloo"
    assert Groups(backend="nccl", device="cpu").resolved == "nccl"


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused without a GPU only")
def test_a_publisher_that_cannot_make_groups_leaves_nothing(tmp_path):
    with pytest.raises(ConfigError, match="needs a learner with a GPU"):
        Publisher(tmp_path / "weights", groups=Groups(backend="nccl"))
    made = Publisher(tmp_path / "weights")
    made.close()


def test_a_bind_that_is_open_needs_a_decision_and_leaves_nothing(tmp_path):
    with pytest.raises(ConfigError, match=r"weights\.security=curve"):
        Publisher(tmp_path / "weights", bind="tcp://*:*")
    made = Publisher(tmp_path / "weights")
    made.close()
