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


class SglangSection(Section):
    """The SGLang server behind each generator, with engine=sglang (docs/sglang.md)."""

    urls: tuple[str, ...] = ()
    """Running servers, as http://HOST:PORT: generator g0 uses the first, g1 the second, ... Empty: each generator
    starts a server of its own."""
    command: tuple[str, ...] = ("python", "-m", "sglang.launch_server")
    """Starts a server: an interpreter of the environment that has SGLang, and what it runs. `python` is the one of
    asyncrl."""
    args: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further flags of the server, without `--`: `tp-size: 4`, `mem-fraction-static: 0.8`; true is a bare flag."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the server."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the server of g0 on its host, one more for each further one there; 0 takes free ones."""
    gpus: NonNegative = 0
    """GPUs that each server on a host gets through CUDA_VISIBLE_DEVICES; 0 leaves that variable alone."""
    first_gpu: NonNegative = 0
    """With gpus: number of the first one that servers may have; the learner has those before it."""
    key_file: str | None = Field(None, min_length=1)
    """File with the API key of the server; started servers get it as theirs."""
    admin_key_file: str | None = Field(None, min_length=1)
    """File with the key for weight updates and pauses; default: the API key."""
    start_timeout_s: Seconds = Field(240.0, ge=10)
    """How long a server may take to load the model and to answer; below run.watchdog_s and learner.take_timeout_s."""
    answer_s: Seconds = Field(60.0, ge=1)
    """Longest wait for an answer that needs no sampling, and silence after which a server counts as hung."""


class GeneratorSection(Section):
    """Generator processes."""

    count: int = Field(1, ge=0, le=1024)
    """Generators that `asyncrl run` starts; 0 when all are started by hand."""
    engine: Literal["torch", "sglang"] = "torch"
    """Engine behind each generator: the embedded one, or an SGLang server."""
    sglang: SglangSection = SglangSection()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the embedded engine computes; auto is cuda where torch sees a GPU."""
    model: str | None = Field(None, min_length=1)
    """Model folder of the generators; default: model.path. Must be the same architecture."""
    groups_in_flight: int = Field(32, ge=1, le=4096)
    """Groups that one generator samples at a time."""
    routes: Literal["counts", "full"] = "counts"
    """What travels of the routes: counts per expert, or also every token's experts, which algorithm.routes=r3 implies;
    `asyncrl drift` compares experts token by token with them."""
    threads: int = Field(1, ge=1, le=1024)
    """Torch threads."""
    reward_workers: int = Field(1, ge=1, le=256)
    """Worker processes that score rewards."""
    reward_timeout_s: Seconds = Field(10.0, ge=1)
    """Deadline of one call of a verifier, a user's reward or an environment; after it the worker is replaced."""
    reward_memory_bytes: int = Field(2**32, ge=2**28)
    """Address space of one worker that scores rewards or runs environments; beyond it a call fails."""
    environment_workers: int = Field(1, ge=1, le=256)
    """Worker processes that run the episodes of task.environment."""


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

    carrier: Literal["shm", "zmq", "collective", "disk"] = "shm"
    """shm: memory-mapped files on the same host. zmq: over the network, in chunks that generators ask for.
    collective: a process group with each SGLang server. disk: folders on a file system that all hosts share."""
    bind: str = Field("tcp://127.0.0.1:*", min_length=1)
    """zmq, collective: address at which the learner serves versions; `*` takes a free port."""
    security: Literal["loopback", "curve", "none"] | None = None
    """zmq, collective: as replay.security, which is the default."""
    keys: str | None = Field(None, min_length=1)
    """zmq, collective: key folder whose server key is the learner's; default: replay.keys."""
    dir: str | None = Field(None, min_length=1)
    """disk: folder of the versions; default: `weights` in the run folder."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """collective: of the process groups; auto is nccl where the learner computes on GPUs."""
    bucket_bytes: int = Field(2**29, ge=2**10)
    """collective: bytes of one broadcast, of whole tensors; a larger tensor goes alone."""
    timeout_s: Seconds = Field(120.0, ge=1)
    """collective, disk: longest phase of an update (joining the group, one bucket, loading a folder, a checksum)."""
    quantize: Literal["none", "fp8_block"] = "none"
    """collective, disk: fp8_block sends linear and expert weights as FP8 with a scale per 128 x 128 block, for servers
    that were started from such a checkpoint (generator.model)."""
    verify: Literal["checksum", "off"] = "checksum"
    """collective, disk: compare checksums of the server's tensors with the learner's before a version counts as
    loaded."""
    delta: bool = True
    """zmq: send only what changed where that is smaller; every generator then keeps a copy of the weights."""
    on_load: Literal["keep", "abort", "drain"] = "keep"
    """What new weights do to running responses. keep: they go on and carry two versions. abort: those that are not
    finished are sampled again. drain: no new ones start until they are finished."""
    keep_versions: int = Field(2, ge=2, le=64)
    """Published versions that stay on disk."""
    paused: bool = False
    """Publish nothing while true: `asyncrl tune RUN weights.paused=true` holds a running job as soon as it needs newer
    weights; false lets it go on."""


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
    dump_every: NonNegative = 0
    """Updates between dumps of what an update trained on, for `asyncrl drift` and replay offline; 0 is never."""
    dump_policy: bool = True
    """Write the policy before that update into each dump, as a model folder: checkpoints are gone when a run is over.
    The learner stands still for it."""
