"""How a generator reads the versions that the learner publishes."""

from __future__ import annotations

from asyncrl.config import Config
from asyncrl.transport.keys import client_keys
from asyncrl.weights.reader import Reader


def reader(config: Config) -> Reader:
    """A reader of the published versions, with the keys that their publisher asks for."""
    w, keys = config.weights, None
    if w.carrier in ("zmq", "collective"):
        setting = "weights.keys" if w.keys is not None else "replay.keys"
        keys = client_keys(config.weights_security, config.weights_keys, config.replay.client, setting)
    return Reader(w.delta, keys)
