"""One YAML, one Config: sections, bounds and the rules between them. Sole user of OmegaConf.

`load_config` merges several files and `key=value` overrides from left to right and validates the
result. Loops take their section, leaves take plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from asyncrl.errors import ConfigError
from asyncrl.rules import problems
from asyncrl.suggest import explain, in_range, meant

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(le=1_000_000)]
SEED_MAX = 2**31 - 1  # what torch, numpy and reasoning-gym all take


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _as_meant(cls, value: Any, read: Callable[[Any], Any], info: ValidationInfo) -> Any:
        return in_range(read(meant(value, cls.model_fields[str(info.field_name)].annotation)))


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
    """How often a generator that died is started again, over the whole run."""
    max_replay_restarts: NonNegative = 3
    """How often replay is started again when it died, over the whole run; it goes on where it was."""
    start_timeout_s: Seconds = Field(180.0, ge=10)
    """How long roles wait for each other at start (importing torch alone takes seconds)."""


class ModelSection(Section):
    """The policy: a Hugging Face folder."""

    path: str = Field(..., min_length=1)
    """Folder with config.json, safetensors and tokenizer files."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Dtype of the learner's parameters."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of transformers."""
    experts: Literal["eager", "grouped_mm"] = "grouped_mm"
    """Expert implementation of transformers (batched_mm is left out: 16-21x slower on CPU)."""


class ChainSumTask(Section):
    """reasoning-gym chain_sum with a running-total answer; `make quickstart` uses it."""

    name: Literal["chain_sum"] = "chain_sum"
    """The task."""
    min_terms: int = Field(2, ge=2, le=8)
    """Fewest terms of a training expression."""
    max_terms: int = Field(5, ge=2, le=8)
    """Most terms of a training and of an evaluation expression."""
    digits: int = Field(1, ge=1, le=3)
    """Digits per term."""
    train_size: Positive = 8192
    """Different training prompts; the cursor starts the next epoch after the last one."""
    eval_size: Positive = 400
    """Held-out prompts; none equals a training expression."""
    eval_min_terms: int = Field(3, ge=3, le=8)
    """Fewest terms of a held-out expression (there are too few 2-term ones to hold out)."""
    seed: int = Field(1, ge=0, le=SEED_MAX)
    """Seeds the items; train and evaluation items come from disjoint index ranges."""


class SamplingSection(Section):
    """How responses are sampled for training."""

    temperature: float = Field(1.0, ge=0.01, le=10)
    """Both sides compute log-probs at this temperature."""
    max_new_tokens: Positive = 32
    """Longest response; with the longest prompt it must fit what the model was made for."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Only 1.0: see the cross-field rules."""
    top_k: NonNegative = 0
    """Only 0 (off)."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Only 0 (off)."""


class GeneratorSection(Section):
    """Generator processes."""

    count: int = Field(1, ge=0, le=1024)
    """Generators that `asyncrl run` starts; 0 when all are started by hand."""
    engine: Literal["torch"] = "torch"
    """Engine behind each generator."""
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
    keys: str | None = Field(None, min_length=1)
    """Key folder of `asyncrl keys new`, for security curve (docs/security.md)."""
    client: str = Field("client", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=100)
    """Name of the client key pair in `keys` with which generators and the learner connect."""
    capacity_bytes: int = Field(2**31, ge=2**16)
    """Cap on the payload of queued groups."""
    lease_timeout_s: Seconds = Field(120.0, ge=10)
    """A lease older than this is given out again. A group whose arrival was not confirmed is sent again after 5 s."""
    heartbeat_timeout_s: Seconds = Field(15.0, ge=3)
    """A generator silent for this long is dead; its leases are given out again. It beats once a second."""
    max_attempts: Positive = 5
    """Leases of one prompt before it is dropped and counted."""


class StalenessSection(Section):
    """Age of the data: one rule (docs/staleness.md)."""

    sync_every: Positive = 4
    """N: weights are published every N updates."""
    max_lag: NonNegative = 8
    """A token of version w trains update u only if u - w <= max_lag."""
    updates_per_take: Positive = 1
    """M: updates made from one take."""
    stale: Literal["mask", "evict"] = "mask"
    """What happens to tokens older than max_lag."""
    on_evict: Literal["requeue", "drop"] = "requeue"
    """What happens to the prompt of an evicted group."""


class RdcSection(Section):
    """Router Drift Control (docs/rdc.md)."""

    mode: Literal["filter", "observe", "random", "off"] = "filter"
    """filter drops, observe only measures, random drops as many at random, off does neither."""
    q: float = Field(0.08, ge=0, lt=1)
    """Fraction of responses to drop per update."""
    gate: Literal["top_q", "outlier"] = "top_q"
    """top_q: the paper's rule. outlier: drift above median + k MAD of its bucket."""
    outlier_k: float = Field(4.0, gt=0, le=1_000_000)
    """k of the outlier gate."""
    outlier_floor: float = Field(0.02, ge=0, le=1)
    """Absolute drift below which the outlier gate never drops."""
    signal: Literal["drift", "log_ratio"] = "drift"
    """What is ranked: router drift or mean |log pi/mu|."""
    buckets: Literal["auto"] | Positive = "auto"
    """Length buckets: auto = min(4, max(1, floor(q n)))."""
    bucket_edges: tuple[Positive, ...] | None = None
    """Explicit upper edges in tokens, ascending; replaces `buckets`."""
    normalize: Literal["batch", "retained"] = "batch"
    """Loss tokens that divide the loss: of the batch before filtering, or of what stays."""
    baseline: Literal["batch", "retained"] = "batch"
    """Rewards that enter the advantage baseline."""
    on_undefined: Literal["keep", "drop"] = "keep"
    """Responses without a defined drift."""


class CorrectionSection(Section):
    """Correction of the rollout-learner mismatch in token probabilities."""

    kind: Literal["none", "tis"] = "tis"
    """tis: truncated importance sampling, min(pi_old / mu, cap), detached."""
    cap: float = Field(2.0, gt=0, le=1_000_000)
    """Upper bound of the weight."""
    level: Literal["token", "sequence"] = "token"
    """One weight per token or per response."""


class AlgorithmSection(Section):
    """Objective."""

    groups_per_update: int = Field(32, ge=1, le=65536)
    """G: groups per optimizer step."""
    group_size: int = Field(8, ge=2, le=1024)
    """Responses per prompt."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"] = "grpo"
    """Advantage estimator."""
    surrogate: Literal["clip"] = "clip"
    """Policy-gradient surrogate."""
    ratio: Literal["proximal", "behaviour"] = "proximal"
    """Denominator of the clipped ratio: pi_old of the scoring pass, or the rollout policy mu."""
    eps_low: float = Field(0.2, gt=0, lt=1)
    """Lower clip range."""
    eps_high: float = Field(0.27, gt=0, le=1_000_000)
    """Upper clip range (DAPO clip-higher)."""
    dual_clip: float | None = Field(None, gt=1, le=1_000_000)
    """Bound on the ratio of negative-advantage tokens; None is off."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """How token losses become one loss."""
    zero_variance: Literal["keep", "refill"] = "keep"
    """Groups of equal rewards: keep with advantage 0, or drop before the take."""
    routes: Literal["native", "r3"] = "native"
    """r3 forces the rollout routes in the scoring and the update pass."""
    native_drift_every: NonNegative = 1
    """Under r3: updates between extra passes that measure the exact native drift; 0 is never."""
    rdc: RdcSection = RdcSection()
    correction: CorrectionSection = CorrectionSection()


class LearnerSection(Section):
    """The learner."""

    ranks: int = Field(1, ge=1, le=1024)
    """Processes under torchrun."""
    updates: Positive = 120
    """Optimizer steps of the run."""
    lr: float = Field(3e-4, gt=0, le=1)
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW moments, each in [0, 1)."""
    weight_decay: float = Field(0.0, ge=0, le=1)
    """Decoupled weight decay."""
    warmup_updates: NonNegative = 5
    """Linear warm-up of the learning rate."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient-norm clip."""
    micro_batch_tokens: Positive = 16384
    """Padded tokens per micro-batch."""
    logprob_chunk: Positive = 4096
    """Rows of the logits that are materialised at once."""
    scoring: Literal["auto", "separate"] = "auto"
    """auto: score and update share one forward when every rank's share fits one micro-batch."""
    threads: int = Field(1, ge=1, le=1024)
    """Torch threads per rank."""
    max_skipped_updates: Positive = 5
    """Skipped updates in a row (non-finite, or all filtered) that end the run."""
    take_timeout_s: Seconds = Field(300.0, ge=10)
    """Longest wait for a take before the learner gives up; longer than replay.heartbeat_timeout_s."""
    collective_timeout_s: Seconds = Field(120.0, ge=10)
    """Timeout of a collective between ranks (rank 0 also commits and publishes in between)."""


class WeightsSection(Section):
    """How published weights travel."""

    carrier: Literal["shm"] = "shm"
    """shm: memory-mapped files on the same host."""
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


class Config(Section):
    """A whole run, resolved."""

    run: RunSection = RunSection()
    model: ModelSection
    task: ChainSumTask = ChainSumTask()
    sampling: SamplingSection = SamplingSection()
    generator: GeneratorSection = GeneratorSection()
    replay: ReplaySection = ReplaySection()
    staleness: StalenessSection = StalenessSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    learner: LearnerSection = LearnerSection()
    weights: WeightsSection = WeightsSection()
    eval: EvalSection = EvalSection()
    logging: LoggingSection = LoggingSection()

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return Path(self.run.dir) / self.run.name

    @property
    def responses_per_update(self) -> int:
        """n of one update when every group is whole."""
        return self.algorithm.groups_per_update * self.algorithm.group_size

    @property
    def full_routes(self) -> bool:
        """True when the generator must send routes and not only counts."""
        return self.algorithm.routes == "r3"

    @model_validator(mode="after")
    def _cross_field_rules(self) -> Config:
        for problem in problems(self):
            raise ValueError(problem)
        return self


def load_config(paths: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()) -> Config:
    """Merge YAML files and `key=value` overrides, left to right, and validate.

    Returns a frozen Config. Raises ConfigError that names the key, the value and the remedy.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    files = [paths] if isinstance(paths, str | Path) else list(paths)
    if not files:
        raise ConfigError("no config file given; pass one, for example configs/quickstart.yaml")
    try:
        layers = []
        for file in files:
            if not Path(file).is_file():
                raise ConfigError(f"config file {str(file)!r} does not exist")
            layers.append(OmegaConf.load(file))
            if not isinstance(layers[-1], DictConfig):
                raise ConfigError(f"config file {str(file)!r} must be a mapping of sections")
        for item in overrides:
            if not item.partition("=")[1] or not item.partition("=")[0].strip():
                raise ConfigError(f"override {item!r} is not key=value")
        layers.append(OmegaConf.from_dotlist(list(overrides)))
        tree = OmegaConf.to_container(OmegaConf.merge(*layers), resolve=True)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError, OSError) as exc:
        raise ConfigError(f"cannot read the config: {exc}") from exc
    if not isinstance(tree, dict):
        raise ConfigError(f"the config must be a mapping of sections, got {type(tree).__name__}")
    return validate({str(k): v for k, v in tree.items()})


def validate(tree: dict[str, Any]) -> Config:
    """Validate a plain mapping. Raises ConfigError with one line per problem."""
    try:
        return Config.model_validate(tree)
    except ValidationError as exc:
        keys = known_keys()
        lines = [line for error in exc.errors() for line in explain(error, keys)]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from exc


def to_yaml(config: Config) -> str:
    """The resolved config as YAML; loading it gives an equal Config."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def save_config(config: Config, path: str | Path) -> None:
    """Write the resolved config as YAML; `load_config(path)` gives an equal Config."""
    Path(path).write_text(to_yaml(config))


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the config, sections included."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            keys += known_keys(info.annotation, f"{prefix}{name}.")
    return keys
