"""Which settings a running job takes new values of (`asyncrl tune`), when they apply, and why the others do not.

Knows the config as a value; who holds the live values, and who applies them, is elsewhere (asyncrl.replay.knobs).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from asyncrl.config import Config, known_keys, validate
from asyncrl.errors import ConfigError
from asyncrl.suggest import suggest

_TAKE = "replay and learner, from the next take on"
_LEARN = "learner, from the next take on"

TUNABLE: Mapping[str, str] = {
    "staleness.max_lag": _TAKE,
    "staleness.sync_every": _TAKE,
    "staleness.stale": "replay, from the next take on",
    "staleness.patience": "replay, from the next take on",
    "staleness.on_evict": "replay, from the next take on",
    "algorithm.zero_variance": "replay, for groups that arrive after the next take",
    "algorithm.eps_low": _LEARN,
    "algorithm.eps_high": _LEARN,
    "algorithm.dual_clip": _LEARN,
    "algorithm.native_drift_every": _LEARN,
    "algorithm.rdc": _LEARN,
    "algorithm.correction": _LEARN,
    "learner.lr": _LEARN,
    "learner.min_lr": _LEARN,
    "learner.max_grad_norm": _LEARN,
    "learner.weight_decay": _LEARN,
    "learner.micro_batch_tokens": _LEARN,
    "generator.groups_in_flight": "generators, at once",
    "eval.every": "replay and learner, with the first version after the next take",
    "weights.paused": "learner, from the next take on; false ends a pause within seconds",
    "logging.histograms_every": _LEARN,
    "logging.dump_every": _LEARN,
    "logging.dump_policy": _LEARN,
    "alarms": _LEARN,
    "sentinel": _TAKE,
}
"""Key, or section with all its keys, to who applies a new value and from when on."""

_RESUME = "stop the run and go on with `asyncrl run RUN/config.yaml --resume KEY=VALUE`"
_ANOTHER = "begin another run with another run.name"

FIXED: Mapping[str, str] = {
    "run": f"the processes of a run are named and watched by it from their start on; {_RESUME}",
    "run.seed": f"prompt ids and their order follow from it; {_ANOTHER}",
    "run.dir": "it says where the run folder is, which is in use; stop the run, move the folder, and resume it there",
    "run.name": "it names the run folder, which is in use; stop the run, rename the folder, and resume it there",
    "model": f"the weights in memory and in the checkpoints were made with it; {_RESUME}, or {_ANOTHER}",
    "task": f"prompts and their ids follow from it; {_ANOTHER}",
    "sampling": f"both sides compute log-probs by it, and responses under way were sampled with it; {_RESUME}",
    "replay": f"replay reads it when it binds its socket and reserves its memory; {_RESUME}",
    "generator.count": "generators are started and ended, not tuned; start further ones with `asyncrl generate`, end "
    "one with SIGTERM",
    "generator.engine": f"each generator builds its engine at its start; {_RESUME}",
    "generator.sglang": f"each generator starts or probes its server once; {_RESUME}",
    "generator.device": f"each generator builds its engine at its start; {_RESUME}",
    "generator.model": f"each generator loads it at its start; {_RESUME}",
    "generator.routes": f"replay reserves memory for the routes, and groups under way lack them; {_RESUME}",
    "generator.threads": f"torch sizes its thread pool once; {_RESUME}",
    "generator.reward_workers": f"each generator starts them once; {_RESUME}",
    "generator.reward_memory_bytes": f"workers are limited when they start; {_RESUME}",
    "generator.environment_workers": f"each generator starts them once; {_RESUME}",
    "generator.reward_timeout_s": f"the pool of reward workers is built with it; {_RESUME}",
    "staleness.updates_per_take": f"replay reserves memory for a take of that many updates; {_RESUME}",
    "algorithm": f"it is another objective: curves before and after would not compare; {_RESUME}",
    "algorithm.groups_per_update": f"replay reserves memory for it, and the admission rule counts in it; {_RESUME}",
    "algorithm.group_size": f"groups under way have that many responses, and prompt ids follow from it; {_ANOTHER}",
    "algorithm.truncated": f"groups under way were scored by it, and rewards would not compare; {_RESUME}",
    "algorithm.truncated_penalty": f"groups under way were scored by it, and rewards would not compare; {_RESUME}",
    "algorithm.overlong_buffer": f"groups under way were scored by it, and rewards would not compare; {_RESUME}",
    "algorithm.kl": "the reference policy is loaded at the start, and curves before and after would not compare; "
    f"{_RESUME}",
    "algorithm.routes": f"it decides what generators send and which forward the learner builds; {_RESUME}",
    "learner.ranks": f"the process group is made once; {_RESUME}",
    "learner.device": f"the policy is placed once; {_RESUME}",
    "learner.activation_checkpointing": f"the layers are wrapped when the policy is built; {_RESUME}",
    "learner.compile": f"the layers are compiled when the policy is built; {_RESUME}",
    "learner.updates": f"all roles plan the end of the run by it; {_RESUME} (a run may get longer)",
    "learner.betas": f"the moments in the optimizer were gathered with them; {_RESUME}",
    "learner.warmup_updates": f"the learning rate is a function of the update by it; tune learner.lr, or {_RESUME}",
    "learner.lr_schedule": f"the learning rate is a function of the update by it; tune learner.lr, or {_RESUME}",
    "learner.logprob_chunk": f"the policy is built with it; {_RESUME}",
    "learner.scoring": f"it changes which forwards run, not what is learned; {_RESUME}",
    "learner.checkpoint_every": f"a checkpoint may be under way by it; {_RESUME}",
    "learner.keep_checkpoints": f"checkpoints are kept by what the learner read at its start; {_RESUME}",
    "learner.keep_best": f"which versions are kept until they are measured is planned by it; {_RESUME}",
    "learner.async_checkpoints": f"a checkpoint may be under way by it; {_RESUME}",
    "learner.checkpoint_timeout_s": f"waits under way are bounded by it; {_RESUME}",
    "learner.threads": f"torch sizes its thread pool once; {_RESUME}",
    "learner.max_skipped_updates": f"skips in a row are counted against it from the start; {_RESUME}",
    "learner.take_timeout_s": f"waits under way are bounded by it; {_RESUME}",
    "learner.collective_timeout_s": f"the process group is made with it; {_RESUME}",
    "weights.carrier": f"the publisher and its readers are opened once; {_RESUME}",
    "weights.bind": f"the publisher binds once; {_RESUME}",
    "weights.security": f"the publisher binds once; {_RESUME}",
    "weights.keys": f"the publisher binds once; {_RESUME}",
    "weights.dir": f"versions lie there already; {_RESUME}",
    "weights.backend": f"process groups with the engines are made with it; {_RESUME}",
    "weights.bucket_bytes": f"senders reserve their buffers with it; {_RESUME}",
    "weights.timeout_s": f"waits under way are bounded by it; {_RESUME}",
    "weights.quantize": f"servers were started for it; {_RESUME}",
    "weights.verify": f"each generator reads it when it opens its engine; {_RESUME}",
    "weights.delta": f"publisher and generators keep copies for it from their start on; {_RESUME}",
    "weights.on_load": f"each generator builds the gate of its engine with it; {_RESUME}",
    "weights.keep_versions": f"the publisher reserves memory for them; {_RESUME}",
    "eval.samples": f"an evaluation under way has that many answers, and curves would not compare; {_RESUME}",
    "eval.greedy": f"an evaluation under way has that many answers, and curves would not compare; {_RESUME}",
    "eval.timeout_s": f"waits under way are bounded by it; {_RESUME}",
    "alarms.command": "it is run on the learner's host, so that only whoever may write its config may choose it; "
    f"{_RESUME}",
    "logging.tensorboard": f"the metrics files are opened once; {_RESUME}",
    "logging.progress": f"`asyncrl run` draws it from its start on; {_RESUME}",
}
"""Key, or section with all its keys, to why a running job does not change it, and what to do instead."""


@cache
def _known() -> tuple[str, ...]:
    return tuple(known_keys())


@cache
def leaves() -> tuple[str, ...]:
    """Every dotted key of the config that holds a value."""
    known = _known()
    return tuple(k for k in known if not any(other.startswith(f"{k}.") for other in known))


def entry(key: str, table: Mapping[str, str]) -> str:
    """The longest entry of a table that is `key` or a section above it, or ""."""
    while key and key not in table:
        key = key.rpartition(".")[0]
    return key


def is_tunable(key: str) -> bool:
    """True for a key of the config that a running job takes new values of."""
    return key in leaves() and len(entry(key, TUNABLE)) > len(entry(key, FIXED))


@cache
def tunable_keys() -> tuple[str, ...]:
    """All of them, in the order of the config."""
    return tuple(key for key in leaves() if is_tunable(key))


def applies(key: str) -> str:
    """Who applies a new value of a tunable key, and from when on."""
    return TUNABLE[entry(key, TUNABLE)]


def check(key: str) -> None:
    """Raise ConfigError for a key that cannot be tuned, with the reason and the remedy."""
    known = _known()
    if key not in known:
        guess = suggest(key, known)
        hint = f"did you mean {guess!r}?" if guess else "`asyncrl tune RUN` prints the keys that can be tuned"
        raise ConfigError(f"unknown key {key!r}; {hint}")
    if key not in leaves():
        inner = next((k for k in tunable_keys() if k.startswith(f"{key}.")), "")
        inside = f"; name a key in it, such as {inner}" if inner else f": {FIXED[entry(key, FIXED)]}"
        raise ConfigError(f"{key} is a section{inside}")
    if not is_tunable(key):
        why = FIXED.get(entry(key, FIXED), f"no role reads it again; {_RESUME}")
        raise ConfigError(f"{key} cannot be changed in a running job: {why}")


def merged(config: Config, values: Mapping[str, Any]) -> Config:
    """`config` with new values of tunable keys, validated as a config is. ConfigError names key, value and remedy.

    A generator's memory is sized at its start: what would not fit it is refused too, against `config`.
    """
    tree = config.model_dump(mode="json")
    for key, value in values.items():
        check(key)
        section, at = key.split("."), tree
        for name in section[:-1]:
            at = at[name]
        at[section[-1]] = value
    new = validate(tree)
    old, wanted = config.generator.groups_in_flight, new.generator.groups_in_flight
    if new.generator.engine == "torch" and wanted > old:
        raise ConfigError(
            f"generator.groups_in_flight={wanted} is more than the {old} of the config, for which the KV cache of the "
            f"embedded engine was sized at its start; set it to at most {old}, or {_RESUME}"
        )
    return new


def merged_json(config: Config, values: Mapping[str, str]) -> Config:
    """As `merged`, of values as JSON. ConfigError also for what is no JSON."""
    return merged(config, {key: read(key, text) for key, text in values.items()})


def read(key: str, text: str) -> Any:
    """A value as JSON. ConfigError names the key."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{key}: the value is no JSON ({exc})") from exc


def flat(config: Config) -> dict[str, str]:
    """The value of every tunable key, as JSON in one spelling."""
    tree, out = config.model_dump(mode="json"), {}
    for key in tunable_keys():
        at: Any = tree
        for name in key.split("."):
            at = at[name]
        out[key] = json.dumps(at, sort_keys=True)
    return out
