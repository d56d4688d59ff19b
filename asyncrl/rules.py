"""The rules between settings, all in one place, each with the key, the value and the remedy.

Knows the config as a value; reads no file and no environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl import rules_algorithm, rules_task

if TYPE_CHECKING:
    from asyncrl.config import Config


def problems(c: Config) -> Iterator[str]:
    """One sentence per rule that the config breaks."""
    s = c.staleness
    if s.max_lag < s.sync_every - 1:
        yield (
            f"staleness.max_lag={s.max_lag} is smaller than sync_every - 1 = {s.sync_every - 1}: the learner would "
            f"wait for a version that can never be published; set staleness.max_lag >= {s.sync_every - 1} "
            f"or staleness.sync_every <= {s.max_lag + 1}"
        )
    if s.max_lag < s.updates_per_take - 1:
        yield (
            f"staleness.max_lag={s.max_lag} is smaller than updates_per_take - 1 = {s.updates_per_take - 1}: the last "
            f"update of a take could use none of it; set staleness.max_lag >= {s.updates_per_take - 1}"
        )
    if c.model.dtype == "float64" and c.model.experts == "grouped_mm":
        yield "model.experts=grouped_mm has no float64 kernel; set model.experts=eager with model.dtype=float64"
    yield from _compute(c)
    for key, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if getattr(c.sampling, key) != off:
            yield (
                f"sampling.{key}={getattr(c.sampling, key)}: truncated sampling makes rollout log-probs incomparable "
                f"with the learner's full distribution; set sampling.{key}={off}"
            )
    yield from rules_task.problems(c)
    yield from rules_algorithm.problems(c)
    if not all(0 <= beta < 1 for beta in c.learner.betas):
        yield (
            f"learner.betas={list(c.learner.betas)} must lie in [0, 1): AdamW divides by 1 - beta; "
            "set learner.betas=[0.9,0.98]"
        )
    if c.replay.security == "curve" and c.replay.keys is None:
        yield (
            "replay.security=curve needs replay.keys; make a folder with `asyncrl keys new DIR` and set replay.keys=DIR"
        )
    if c.replay.security != "curve" and c.replay.keys is not None:
        yield (
            f"replay.keys={c.replay.keys!r} would not be used with replay.security={c.replay.security}; "
            "set replay.security=curve or replay.keys=null"
        )
    served = c.weights.carrier in ("zmq", "collective")
    if c.weights_security == "curve" and served and c.weights_keys is None:
        yield (
            "weights.security=curve needs weights.keys; make a folder with `asyncrl keys new DIR` and set "
            "weights.keys=DIR"
        )
    if c.weights.keys is not None and (not served or c.weights_security != "curve"):
        yield (
            f"weights.keys={c.weights.keys!r} would not be used with weights.carrier={c.weights.carrier} and "
            f"weights.security={c.weights_security}; set weights.carrier=zmq or collective and weights.security=curve, "
            "or weights.keys=null"
        )
    yield from _schedule(c)
    yield from _waits(c)
    yield from _alarms(c)


def _schedule(c: Config) -> Iterator[str]:
    """Rules of the learning rate."""
    s = c.learner
    if s.min_lr and s.lr_schedule == "constant":
        yield (
            f"learner.min_lr={s.min_lr:g} has no effect with learner.lr_schedule=constant; set "
            "learner.lr_schedule=linear or cosine, or learner.min_lr=0"
        )
    if s.min_lr > s.lr:
        yield (
            f"learner.min_lr={s.min_lr:g} is above learner.lr={s.lr:g}: it is a learning rate, not a share of it; "
            f"set learner.min_lr <= {s.lr:g}"
        )


def _compute(c: Config) -> Iterator[str]:
    """Rules between dtype, device, attention and compilation."""
    m, s = c.model, c.learner
    if m.attention == "flash_attention_2" and m.dtype != "bfloat16":
        yield (
            f"model.attention=flash_attention_2 has no {m.dtype} kernel; set model.dtype=bfloat16 or "
            "model.attention=sdpa"
        )
    if m.attention == "flash_attention_2" and s.device == "cpu":
        yield "model.attention=flash_attention_2 runs on GPUs only; set learner.device=cuda or model.attention=sdpa"
    if m.router_dtype == "float32" and m.dtype == "float64":
        yield "model.router_dtype=float32 would be less than model.dtype=float64; set model.router_dtype=checkpoint"
    if s.compile and m.experts != "grouped_mm":
        yield (
            f"learner.compile=true would compile anew for every batch with model.experts={m.experts}; set "
            "model.experts=grouped_mm or learner.compile=false"
        )


def _waits(c: Config) -> Iterator[str]:
    """Rules between the times that roles wait for each other."""
    if c.staleness.stale == "wait" and c.learner.take_timeout_s <= c.replay.lease_timeout_s:
        yield (
            f"learner.take_timeout_s={c.learner.take_timeout_s:g} is not longer than replay.lease_timeout_s="
            f"{c.replay.lease_timeout_s:g}, for which staleness.stale=wait may wait; set learner.take_timeout_s > "
            f"{c.replay.lease_timeout_s:g}"
        )
    if c.learner.take_timeout_s <= c.replay.heartbeat_timeout_s:
        yield (
            f"learner.take_timeout_s={c.learner.take_timeout_s:g} is not longer than replay.heartbeat_timeout_s="
            f"{c.replay.heartbeat_timeout_s:g}: the learner would give up before the work of a dead generator is given "
            f"out again; set learner.take_timeout_s > {c.replay.heartbeat_timeout_s:g}"
        )
    if c.run.watchdog_s <= c.replay.heartbeat_timeout_s:
        yield (
            f"run.watchdog_s={c.run.watchdog_s:g} is not longer than replay.heartbeat_timeout_s="
            f"{c.replay.heartbeat_timeout_s:g}: a run would end before a generator counts as dead; set "
            f"run.watchdog_s > {c.replay.heartbeat_timeout_s:g}"
        )


def _alarms(c: Config) -> Iterator[str]:
    """Rules of the alarms."""
    for name, rule in c.alarms.rules().items():
        if rule.updates > rule.window:
            yield (
                f"alarms.{name}.updates={rule.updates} of the last alarms.{name}.window={rule.window} updates can "
                f"never be; set alarms.{name}.window >= {rule.updates}"
            )
        if rule.enabled and "command" in rule.actions and not c.alarms.command:
            yield (
                f"alarms.{name}.actions has command, but alarms.command names no program; set alarms.command or take "
                f"it out of alarms.{name}.actions"
            )
