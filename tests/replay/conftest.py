"""Fixtures of the tests of replay."""

import pytest

from tests.replay.net import Net


@pytest.fixture
def make_net(tmp_path):
    nets = []

    def make(**changes):
        nets.append(Net(tmp_path, **changes))
        return nets[-1]

    yield make
    for net in nets:
        net.close()
