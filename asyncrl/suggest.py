"""What is wrong with a setting, in one line, and the key or the word that was most likely meant.

Knows dotted names, type annotations and pydantic's error records; no section, no file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

SYNONYMS: Mapping[str, str] = {
    # names that other projects and papers use
    "quantile": "algorithm.rdc.q",
    "filter_ratio": "algorithm.rdc.q",
    "filter_fraction": "algorithm.rdc.q",
    "drop_fraction": "algorithm.rdc.q",
    "rdc_q": "algorithm.rdc.q",
    "rdc_mode": "algorithm.rdc.mode",
    "num_buckets": "algorithm.rdc.buckets",
    "lag": "staleness.max_lag",
    "max_staleness": "staleness.max_lag",
    "staleness_bound": "staleness.max_lag",
    "staleness_limit": "staleness.max_lag",
    "max_version_lag": "staleness.max_lag",
    "max_off_policy_steps": "staleness.max_lag",
    "max_offpolicy_steps": "staleness.max_lag",
    "max_head_offpolicyness": "staleness.max_lag",
    "sync_interval": "staleness.sync_every",
    "sync_steps": "staleness.sync_every",
    "weight_sync_every": "staleness.sync_every",
    "mini_batches": "staleness.updates_per_take",
    "batch_size": "algorithm.groups_per_update",
    "prompts_per_update": "algorithm.groups_per_update",
    "num_generations": "algorithm.group_size",
    "samples_per_prompt": "algorithm.group_size",
    "rollouts_per_prompt": "algorithm.group_size",
    "clip_low": "algorithm.eps_low",
    "clip_high": "algorithm.eps_high",
    "tis_cap": "algorithm.correction.cap",
    "importance_cap": "algorithm.correction.cap",
    "clip_ratio_low": "algorithm.eps_low",
    "clip_ratio_high": "algorithm.eps_high",
    "clip_ratio_c": "algorithm.dual_clip",
    "epsilon_high": "algorithm.eps_high",
    "policy_loss": "algorithm.surrogate",
    "loss_mode": "algorithm.surrogate",
    "importance_sampling_level": "algorithm.surrogate",
    "adv_estimator": "algorithm.advantage",
    "advantage_estimator": "algorithm.advantage",
    "loss_agg_mode": "algorithm.aggregation",
    "kl_coef": "algorithm.kl.coef",
    "kl_loss_coef": "algorithm.kl.coef",
    "ref_model": "algorithm.kl.reference",
    "ref_path": "algorithm.kl.reference",
    "routing_replay": "algorithm.routes",
    "learning_rate": "learner.lr",
    "steps": "learner.updates",
    "max_steps": "learner.updates",
    "total_steps": "learner.updates",
    "num_updates": "learner.updates",
    "warmup_steps": "learner.warmup_updates",
    "grad_clip": "learner.max_grad_norm",
    "clip_grad": "learner.max_grad_norm",
    "world_size": "learner.ranks",
    "nproc_per_node": "learner.ranks",
    "model_path": "model.path",
    "model_name": "model.path",
    "max_tokens": "sampling.max_new_tokens",
    "max_response_length": "sampling.max_new_tokens",
    "num_generators": "generator.count",
    "num_actors": "generator.count",
    "run_name": "run.name",
    "eval_every": "eval.every",
}

_WORDS: Mapping[bool, Sequence[str]] = {False: ("off", "none", "no", "false"), True: ("on", "yes", "true")}
"""What a boolean stands for where words are expected: YAML 1.1 reads off and no as False, on and yes as True."""

LARGEST = 2**53
"""Largest whole number of a setting; above it floats, JSON and the wire would change or refuse it."""


_FILES: Mapping[str, tuple[str, str]] = {
    # settings that exist as files: folder, and one of them
    "method": ("configs/methods/", "configs/methods/r3.yaml"),
    "methods": ("configs/methods/", "configs/methods/r3.yaml"),
    "regime": ("configs/regimes/", "configs/regimes/on_policy.yaml"),
    "regimes": ("configs/regimes/", "configs/regimes/on_policy.yaml"),
}

_MAIN: Mapping[str, tuple[str, str, str]] = {
    # the key that a value given to a whole section is meant for, and what off and on are there
    "algorithm.rdc": ("mode", "off", "filter"),
    "algorithm.correction": ("kind", "none", "tis"),
    "model": ("path", "FOLDER", "FOLDER"),
}

_EITHER: Mapping[str, str] = {
    "algorithm.rdc.buckets": "must be auto or a whole number, at least 1",
    "task.train[].options": "an option must be a text, a number, true or false",
    "task.eval[].options": "an option must be a text, a number, true or false",
}
"""Keys of which pydantic reports every alternative apart: one sentence for all of them."""

_NO_LIST = ("tuple_type", "model_type")
"""What pydantic says of a value that is no list, and of an entry of one that is no section."""

_PATTERNS: Mapping[str, str] = {
    "^[A-Za-z0-9_][A-Za-z0-9._-]*$": "must be of letters, digits, '.', '_' and '-', and begin with a letter, "
    "a digit or '_'",
    r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$": "must be package.module:name",
    "^eval/[A-Za-z0-9_./-]+$": "must be a metric of an evaluation, such as eval/greedy_accuracy",
}
"""Patterns of names, in words."""


def meant(value: Any, annotation: Any) -> Any:
    """`value`, or the word of a Literal `annotation` that YAML turned into a boolean.

    Raises ValueError for any other boolean where none is expected: pydantic would read 1 or 0.
    """
    if annotation is bool or bool in get_args(annotation):
        return value
    if isinstance(value, bool):
        for word in _WORDS[value]:
            if word in get_args(annotation):
                return word
    if isinstance(value, bool) or (isinstance(value, list | tuple) and any(isinstance(v, bool) for v in value)):
        raise ValueError("true and false are no numbers or words (YAML reads a bare on, off, yes or no as one)")
    return value


def in_range(value: Any) -> Any:
    """`value`; ValueError for a whole number above LARGEST."""
    if isinstance(value, int) and value > LARGEST:
        raise ValueError(f"must be at most {LARGEST}")
    return value


def suggest(key: str, keys: Sequence[str]) -> str | None:
    """Best guess for an unknown dotted `key` among the known `keys`, or None.

    Tried in this order: the same words in a section of nearly that name, the same last word elsewhere, another
    project's word for it, a near spelling of a neighbour, of another project's word, of any key.
    """
    head, dot, rest = key.partition(".")
    sections = {k.partition(".")[0] for k in keys}
    for section in difflib.get_close_matches(head, sections, 3, 0.7) if dot and head not in sections else ():
        if f"{section}.{rest}" in keys:
            return f"{section}.{rest}"
    leaf = _leaf(key).lower().replace("-", "_")
    by_leaf: dict[str, str] = {}
    for known in sorted(keys, key=lambda k: "[]" in k):  # a key outside of lists is meant more often
        by_leaf.setdefault(_leaf(known), known)
    if leaf in by_leaf:
        return by_leaf[leaf]
    if leaf in SYNONYMS:
        return SYNONYMS[leaf]
    neighbours = {_leaf(k): k for k in keys if k.rpartition(".")[0] == key.rpartition(".")[0]}
    attempts: tuple[tuple[str, Mapping[str, str], float], ...] = (
        (leaf, neighbours, 0.75),
        (leaf, SYNONYMS, 0.75),
        (key, {k: k for k in keys}, 0.7),
        (leaf, neighbours, 0.6),
        (leaf, by_leaf, 0.6),
    )
    for word, pool, cutoff in attempts:
        close = difflib.get_close_matches(word, list(pool), n=1, cutoff=cutoff)
        if close:
            return pool[close[0]]
    return None


def explain(error: Any, keys: Sequence[str]) -> Iterator[str]:
    """One line per problem of one pydantic error record; `keys` are the known dotted keys."""
    path = list(error["loc"])
    if error["type"] == "extra_forbidden":
        for key, value in _leaves(_dotted(path), error["input"]):
            yield f"unknown key {key!r} (value {value!r}); {_hint(key, keys)}"
        return
    if error["type"] == "missing" and _dotted(path) in keys:
        yield _missing(_dotted(path))
        return
    if error["type"] == "value_error" and not path:
        yield str(error["ctx"]["error"])
        return
    # what follows the key in a path is an index or the branch of a union, of no use to the reader
    branch = len(path)
    while path and _general(_dotted(path)) not in keys:
        path.pop()
    key = _dotted(path)
    yield f"{key}={error['input']!r}: {_reason(error, _general(key), len(path) < branch, keys)}"


def _dotted(path: Sequence[str | int]) -> str:
    """a.b for fields, a[0] for places of a list."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).removeprefix(".")


def _general(key: str) -> str:
    """The key as it is known: task.train[0].path is task.train[].path."""
    return re.sub(r"\[\d+\]", "[]", key)


def _hint(key: str, keys: Sequence[str]) -> str:
    if _leaf(key) in _FILES:
        folder, example = _FILES[_leaf(key)]
        return (
            f"a {_leaf(key).removesuffix('s')} is a file of {folder} that goes after the run config, such as {example}"
        )
    guess = suggest(_general(key), keys)
    if guess:
        places = re.findall(r"\[\d+\]", key)
        guess = re.sub(r"\[\]", lambda m: places.pop(0) if places else "[0]", guess)
    return f"did you mean {guess!r}?" if guess else "`asyncrl config` prints every key"


def _missing(key: str) -> str:
    if key in ("model", "model.path"):
        return (
            "key 'model.path' is missing; set model.path=FOLDER, or name a run config first: a method or regime file "
            "goes after a run config such as configs/quickstart.yaml"
        )
    return f"key {key!r} is missing; set it in a config file or as {key}=VALUE"


def _reason(error: Any, key: str, in_branch: bool, keys: Sequence[str]) -> str:
    inner = [k for k in keys if k.startswith(f"{key}.")]
    if inner:
        return _section(key, error["input"], inner)
    if any(k.startswith(f"{key}[].") for k in keys) and error["type"] in _NO_LIST:
        return _listing(key, error["input"])
    if in_branch and key in _EITHER:
        return _EITHER[key]
    if error["type"] == "string_pattern_mismatch":
        return _PATTERNS.get(error["ctx"]["pattern"], error["msg"])
    if error["type"] == "literal_error":
        return str(error["msg"]) + _nearest(error["input"], error["ctx"]["expected"])
    return str(error["msg"]).removeprefix("Value error, ")


def _nearest(value: Any, expected: str) -> str:
    """The choice that was most likely meant, as the end of a sentence; "" when none is near."""
    close = difflib.get_close_matches(str(value).lower(), re.findall(r"'([^']*)'", expected), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _listing(key: str, value: Any) -> str:
    """A value where a list of sources belongs, or an entry of it that is no section: how it is written."""
    if isinstance(value, Mapping) and value and all(str(k).isdigit() for k in value):
        return f"this is a list; name a place in it as {key}[{next(iter(value))}].weight=3"
    entry = value if isinstance(value, Mapping) and value else {"path": value if isinstance(value, str) else "FILE"}
    inside = ", ".join(f"{k}: {v}" for k, v in entry.items())
    return f"must be a list of sources, each with its keys in braces; write '{key}=[{{{inside}}}]', in quotes"


def _section(key: str, value: Any, inner: Sequence[str]) -> str:
    """A value where a section belongs: name the key inside it that was meant."""
    if key in _MAIN and isinstance(value, bool | str):
        leaf, off, on = _MAIN[key]
        word = value if isinstance(value, str) else on if value else off
        return f"this is a section; set {key}.{leaf}={word}"
    return f"this is a section; set a key in it, such as {inner[0]}=VALUE"


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, value


def _leaf(key: str) -> str:
    return key.rsplit(".", 1)[-1]
