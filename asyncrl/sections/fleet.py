"""The processes of a run, the queue and the weights between them, evaluation and logging."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from asyncrl.sections.base import SEED_MAX, NonNegative, Positive, Seconds, Section


class RunSection(Section):
    """Identity of a run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=100)
    """Folder name under `dir`."""
    dir: str = Field("runs", min_length=1)
    """Folder that holds the run folders."""
    seed: int = Field(0, ge=0, le=SEED_MAX)
    """Seeds the prompt order, sampling and shuffles."""
    shutdown_s: Seconds = Field(6.0, ge=1)
    """Time between the request to stop and SIGKILL."""
    max_generator_restarts: NonNegative = 5
    """How often each generator is started again when it died, over the whole run; then it is set aside."""
    max_replay_restarts: NonNegative = 3
    """How often replay is started again when it died, over the whole run; it goes on where it was."""
    max_learner_restarts: NonNegative = 3
    """How often a learner that was killed is started again from its last checkpoint, over the whole run."""
    watchdog_s: Seconds = Field(300.0, ge=5)
    """The run ends with its first cause when nothing can progress for this long; a slow run only warns."""
    start_timeout_s: Seconds = Field(180.0, ge=10)
    """How long roles wait for each other at start (importing torch alone takes seconds)."""


class GeneratorSection(Section):
    """Generator processes."""

    count: int = Field(1, ge=0, le=1024)
    """Generators that `asyncrl run` starts; 0 when all are started by hand."""
    engine: Literal["torch"] = "torch"
    """Engine behind each generator."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the embedded engine computes; auto is cuda where torch sees a GPU."""
    model: str | None = Field(None, min_length=1)
    """Model folder of the generators; default: model.path. Must be the same architecture."""
    groups_in_flight: int = Field(32, ge=1, le=4096)
    """Groups that one generator samples at a time."""
    threads: int = Field(1, ge=1, le=1024)
    """Torch threads."""
    reward_workers: int = Field(1, ge=1, le=256)
    """Worker processes that score rewards."""
    reward_timeout_s: Seconds = Field(10.0, ge=1)
    """Deadline of one verifier call; after it the worker is replaced."""


class ReplaySection(Section):
    """The queue."""

    bind: str = Field("tcp://127.0.0.1:*", min_length=1)
    """Address of the ROUTER socket; `*` takes a free port, published in the run folder."""
    security: Literal["loopback", "curve", "none"] = "loopback"
    """loopback: only this machine. curve: encrypted, only clients whose key is allowed. none: anyone who reaches it."""
    connect: str | None = Field(None, min_length=1)
    """Address that generators and the learner connect to; default: what replay publishes in the run folder."""
    keys: str | None = Field(None, min_length=1)
    """Key folder of `asyncrl keys new`, for security curve (docs/security.md)."""
    client: str = Field("client", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=100)
    """Name of the client key pair in `keys` with which generators and the learner connect."""
    capacity_bytes: int = Field(2**31, ge=2**16)
    """Hard cap on the payload that replay holds; a group larger than its share of a take is given up."""
    lease_timeout_s: Seconds = Field(120.0, ge=2)
    """A lease older than this is given out again. A group whose arrival was not confirmed is sent again after 5 s."""
    on_timeout: Literal["reissue", "partial"] = "reissue"
    """A group unfinished at 0.8 of its lease: give the prompt out again, or send what is finished, if at least two."""
    heartbeat_timeout_s: Seconds = Field(15.0, ge=3)
    """A generator silent for this long is dead; its leases are given out again. It beats once a second."""
    max_attempts: Positive = 5
    """Leases of one prompt before it is dropped, counted and named in the log. Those of versions that a resumed
    learner threw away do not count."""


class WeightsSection(Section):
    """How published weights travel."""

    carrier: Literal["shm", "zmq"] = "shm"
    """shm: memory-mapped files on the same host. zmq: over the network, in chunks that generators ask for."""
    bind: str = Field("tcp://127.0.0.1:*", min_length=1)
    """zmq: address at which the learner serves versions; `*` takes a free port."""
    security: Literal["loopback", "curve", "none"] | None = None
    """zmq: as replay.security, which is the default."""
    keys: str | None = Field(None, min_length=1)
    """zmq: key folder whose server key is the learner's; default: replay.keys."""
    delta: bool = True
    """zmq: send only what changed where that is smaller; every generator then keeps a copy of the weights."""
    on_load: Literal["keep"] = "keep"
    """keep: running responses go on and carry two versions."""
    keep_versions: int = Field(2, ge=2, le=64)
    """Published versions that stay on disk."""


class EvalSection(Section):
    """Held-out evaluation during training, by generators, at a pinned version."""

    every: NonNegative = 20
    """Updates between evaluations (rounded to publications); 0 is off."""
    samples: int = Field(1, ge=1, le=1024)
    """Sampled responses per held-out prompt."""
    greedy: bool = True
    """Also decode greedily."""
    timeout_s: Seconds = Field(180.0, ge=5)
    """A generator defers loading for at most this long."""


class LoggingSection(Section):
    """Metrics and console."""

    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""
    histograms_every: NonNegative = 10
    """Updates between histograms; 0 is never."""
    progress: bool = True
    """Progress bar of `asyncrl run`."""
