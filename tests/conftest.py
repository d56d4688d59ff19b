"""Fixtures of several folders."""

import signal
import threading

import pytest

# A job in the background of a script ignores Ctrl-C, and so would every process that tests start and interrupt.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """The default process group with one gloo rank, made once per test session."""
    import torch
    import torch.distributed as dist

    from asyncrl.learner.shard import World

    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield World(0, 1, torch.device("cpu"))
    dist.destroy_process_group()
