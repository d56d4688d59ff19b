"""Checks of the config against the model folders, the host and the task, before any training process starts.

Builds no task, binds nothing and writes no file.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from asyncrl import preflight_reference, preflight_sglang, rules_algorithm, rules_engine
from asyncrl.config import Config
from asyncrl.errors import ConfigError, TaskError, TransportError
from asyncrl.models.describe import describe, max_length
from asyncrl.models.folder import weights_of
from asyncrl.replay.limits import check_capacity, largest_group_bytes
from asyncrl.sections.fleet import ReplaySection
from asyncrl.tasks import check as check_task
from asyncrl.tasks import longest_prompt, user_reward
from asyncrl.tasks.environments import check as environment_check
from asyncrl.tasks.environments.observations import Observations
from asyncrl.tasks.held_out import check_keep_best
from asyncrl.transport import keys
from asyncrl.transport.address import is_loopback, parse, refuse_open
from asyncrl.types import ModelInfo

log = logging.getLogger(__name__)


def preflight(config: Config, weights: bool = True, generates: bool = False, data: bool = True) -> ModelInfo:
    """The learner's model. Raises ConfigError with a line per problem: key, value and remedy.

    weights: check also that the files with the weights are whole and readable, by their headers. generates: check also
    what generators on this host need. data: check also the task, and that its files are here and can be read.
    """
    info = _check_models(config)
    for note in rules_engine.notes(config):
        log.warning("%s", note)
    problems: list[str] = []
    if config.generator.engine == "sglang":
        problems += preflight_sglang.faults(config, weights, generates)
    if weights:
        problems += _weight_faults(config)
    if generates:
        problems += _user_code_faults(config)
    # Of all roles the learner alone reads it; `asyncrl run` and `asyncrl config` check for it.
    if weights and (data or not generates):
        problems += _reference_faults(config)
    for check in (_check_length, _check_task, lambda c: _check_memory(c, info), _check_network, _check_folders):
        if check is _check_task and not data:
            continue
        try:
            check(config)
        except ConfigError as exc:
            problems.append(str(exc))
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return info


def _user_code_faults(config: Config) -> list[str]:
    """A sentence each for task.reward and task.environment when they cannot be used.

    They are imported in a process of their own: they are foreign code.
    """
    t, memory_bytes, problems = config.task, config.generator.reward_memory_bytes, []
    try:
        if t.reward is not None:
            user_reward.check(t.reward, memory_bytes)
    except TaskError as exc:
        problems.append(str(exc))
    try:
        if t.environment is not None:
            environment_check.check(t.environment, memory_bytes)
            Observations(config.generator.model or config.model.path, t.chat)
    except TaskError as exc:
        problems.append(str(exc))
    return problems


def _reference_faults(config: Config) -> list[str]:
    """Why the reference policy cannot be used, at most a sentence."""
    kl = config.algorithm.kl
    if not kl.coef or kl.reference is None:
        return []
    try:
        longest = _longest_prompt(config) + config.sampling.max_new_tokens
        preflight_reference.check(kl.reference, config.model.path, longest)
    except ConfigError as exc:
        return [str(exc)]
    return []


def _weight_faults(config: Config) -> list[str]:
    """A sentence per model folder whose weights cannot be loaded."""
    folders = {"generator.model": config.generator.model, "model.path": config.model.path}
    if config.generator.engine == "sglang":
        del folders["generator.model"]  # a server reads kinds that the learner does not
    faults = {}
    for key, path in folders.items():
        try:
            if path is not None:
                weights_of(path)
        except ConfigError as exc:
            faults[path] = f"{key}={path!r}: {exc}"
    return list(faults.values())


def _check_task(config: Config) -> None:
    # A rule of runs, not of configs: `asyncrl eval` needs held-out sets alone.
    if config.task.name == "sources" and not config.task.train:
        raise ConfigError(
            "task.train=[]: task.name=sources needs a list of sources; give each a path or a procedural (docs/data.md)"
        )
    check_keep_best(config.learner.keep_best, config.task, config.eval)
    try:
        check_task(config.task, config.run.start_timeout_s)
    except TaskError as exc:
        raise ConfigError(str(exc)) from exc


def _longest_prompt(config: Config) -> int:
    try:
        return longest_prompt(config.task, config.model.path)
    except TaskError as exc:
        raise ConfigError(f"task.chat={str(config.task.chat).lower()}: {exc}") from exc


def _check_memory(config: Config, info: ModelInfo) -> None:
    check_capacity(config, largest_group_bytes(config, info, _longest_prompt(config)))


def _check_network(config: Config) -> None:
    r, w = config.replay, config.weights
    _check_bind("replay", r.bind, r.security, "read prompts and feed the training")
    if r.security == "curve":
        keys.check(r.keys, r.client)
    if w.carrier in ("zmq", "collective"):
        _check_bind("weights", w.bind, config.weights_security, "copy the weights")
        if config.weights_security == "curve":
            keys.check(config.weights_keys, r.client, "replay.keys" if w.keys is None else "weights.keys")
        _check_reach(r, w.bind)
    elif w.carrier == "shm" and not _is_local(r.bind):
        log.warning(
            "replay.bind=%s serves other hosts, but with weights.carrier=shm only generators on the learner's host can "
            "load weights; set weights.carrier=zmq and weights.bind for the others (docs/operations.md)",
            r.bind,
        )
    _check_connect(config.replay)


def _check_models(config: Config) -> ModelInfo:
    info = _describe("model.path", config.model.path)
    if config.generator.model is not None:
        other = _describe("generator.model", config.generator.model)
        for field in ("layers", "num_experts", "top_k", "vocab_size", "fingerprint"):
            ours, theirs = getattr(info, field), getattr(other, field)
            if ours != theirs:
                raise ConfigError(
                    f"generator.model={config.generator.model!r} differs from model.path={config.model.path!r} in "
                    f"{field} ({theirs!r} against {ours!r}); give both the same architecture and tokenizer, "
                    "or leave generator.model unset"
                )
    if not info.is_moe:
        if config.algorithm.replays:
            raise ConfigError(
                f"algorithm.routes={config.algorithm.routes} needs a Mixture-of-Experts model, but "
                f"model.path={config.model.path!r} is dense; set algorithm.routes=native"
            )
        if config.algorithm.compares_routers:
            raise ConfigError(
                f"algorithm.correction.kind={config.algorithm.correction.kind} compares routers and needs a "
                f"Mixture-of-Experts model, but model.path={config.model.path!r} is dense; set "
                f"{rules_algorithm.correction_off(config.algorithm)}"
            )
        if config.algorithm.rdc.mode != "off":
            raise ConfigError(
                f"algorithm.rdc.mode={config.algorithm.rdc.mode} needs a Mixture-of-Experts model, but "
                f"model.path={config.model.path!r} is dense; set algorithm.rdc.mode=off"
            )
    return info


def _describe(key: str, path: str) -> ModelInfo:
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"{key}={path!r} has no config.json; point it at a Hugging Face folder "
            "(`make quickstart` builds models/quickstart)"
        )
    try:
        return describe(path)
    except ValueError as exc:
        raise ConfigError(f"{key}={path!r}: {exc}") from exc


def _check_length(config: Config) -> None:
    prompt, new = _longest_prompt(config), config.sampling.max_new_tokens
    served = config.generator.engine == "sglang"
    limit = preflight_sglang.longest(config) if served else max_length(config.model.path)
    holds = f"model.path={config.model.path!r}{' and its server (generator.sglang.args)' if served else ''} can hold"
    if prompt + new > limit:
        raise ConfigError(
            f"sampling.max_new_tokens={new} and a prompt of up to {prompt} tokens exceed the {limit} tokens that "
            f"{holds}; set sampling.max_new_tokens <= {limit - prompt}"
            if prompt < limit
            else f"a prompt of up to {prompt} tokens leaves no room for sampling.max_new_tokens={new} in the {limit} "
            f"tokens that {holds}; lower "
            + ("task.max_terms" if config.task.name == "chain_sum" else "task.max_prompt_tokens")
        )


def _check_bind(section: str, bind: str, security: str, may: str) -> None:
    """may: what whoever gets in can do."""
    try:
        local = _is_local(bind)
        refuse_open(bind, security, f"{section}.bind")
    except TransportError as exc:
        raise ConfigError(f"{section}.bind={bind!r}: {exc}; set {section}.bind=tcp://127.0.0.1:*") from exc
    if security == "none":
        who = "every user of this machine" if local else "anyone on the network"
        log.warning(
            "%s.security=none: %s who reaches %s.bind=%s can %s; "
            "%s.security=curve lets only your own keys in (docs/security.md)",
            section,
            who,
            section,
            bind,
            may,
            section,
        )


def _check_reach(replay: ReplaySection, bind: str) -> None:
    """Generators that reach replay from other hosts need the weights as well."""
    if _is_local(bind) and not _is_local(replay.bind):
        log.warning(
            "replay.bind=%s serves other hosts, but weights.bind=%s does not: generators there cannot load weights; "
            "set weights.bind=tcp://*:* or an address of the learner's host",
            replay.bind,
            bind,
        )


def _is_local(bind: str) -> bool:
    return is_loopback(parse(bind).host)


def _check_connect(replay: ReplaySection) -> None:
    """A fixed address names a host and a port, and with security loopback this machine."""
    if replay.connect is None:
        return
    setting = f"replay.connect={replay.connect!r}"
    try:
        host, port = parse(replay.connect)
        local = replay.security != "loopback" or is_loopback(host)
    except TransportError as exc:
        raise ConfigError(f"{setting}: {exc}; set replay.connect=tcp://HOST:PORT") from exc
    if host == "*" or port is None:
        raise ConfigError(
            f"{setting} names no host and port to connect to; set replay.connect=tcp://HOST:PORT with the port of "
            "replay.bind"
        )
    if not local:
        raise ConfigError(
            f"{setting} is another machine, and a replay with replay.security=loopback serves its own only; set "
            "replay.security=curve and replay.keys=DIR, or, on a network you trust, replay.security=none"
        )
    fixed = parse(replay.bind).port
    if fixed is not None and fixed != port:
        log.warning("%s: replay.bind=%s has another port; right only behind a forwarder", setting, replay.bind)


def _check_folders(config: Config) -> None:
    _check_writable("run.dir", config.run.dir, config.run_dir)
    if config.weights.carrier == "disk" and config.weights.dir is not None:
        _check_writable("weights.dir", config.weights.dir, Path(config.weights.dir))


def _check_writable(key: str, value: str, folder: Path) -> None:
    """The nearest thing that exists on the way to the folder must be a folder we may write in."""
    try:
        found = next(p for p in (folder, *folder.parents) if _exists(p))
        usable = found.is_dir() and os.access(found, os.W_OK | os.X_OK)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{key}={value!r}: {exc}; set {key} to a folder") from exc
    if not usable:
        state = "cannot be written" if found.is_dir() else "is not a folder"
        raise ConfigError(f"{key}={value!r}: {str(found)!r} {state}; set {key} to another folder")


def _exists(path: Path) -> bool:
    """False only for what could still be made; a dangling link exists. Raises OSError or ValueError for a bad name."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
