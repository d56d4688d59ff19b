"""The rules between the engine, its SGLang server and the carrier of weights, each with the key, value and remedy.

Knows the config as a value; reads no file and no environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from asyncrl.config import Config

_CARRIERS = {
    "dir": ("disk",),
    "backend": ("collective",),
    "bucket_bytes": ("collective",),
    "timeout_s": ("collective", "disk"),
    "quantize": ("collective", "disk"),
    "verify": ("collective", "disk"),
}
"""Keys of weights that other carriers do not read."""

_STARTED = ("command", "args", "env", "port", "gpus", "first_gpu")
"""Keys of generator.sglang that are for servers which are started."""

_FLAGS = {
    "model-path": "set generator.model, or model.path",
    "model": "set generator.model, or model.path",
    "host": "a server that is started serves its own host only; start it yourself and set generator.sglang.urls",
    "port": "set generator.sglang.port",
    "api-key": "set generator.sglang.key_file",
    "admin-api-key": "set generator.sglang.admin_key_file",
    "config": "name the flags in generator.sglang.args; keys go by that file",
    "random-seed": "set run.seed",
    "dtype": "set model.dtype",
    "enable-return-routed-experts": "it is given to every Mixture-of-Experts model",
    "nnodes": "start a server of several hosts yourself and set generator.sglang.urls",
    "base-gpu-id": "set generator.sglang.gpus and first_gpu",
}
"""Flags of a server that the run depends on, with what to do instead."""

_ENV = {
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "log-probs would not be at sampling.temperature",
    "SGLANG_MAX_NEW_TOKENS_LIMIT": "responses would be cut below sampling.max_new_tokens",
}


def problems(c: Config) -> Iterator[str]:
    """One sentence per rule that the config breaks."""
    yield from _carrier(c)
    yield from _quantize(c)
    if c.generator.engine == "torch":
        return
    if c.generator.device != "auto":
        yield (
            f"generator.device={c.generator.device} has no effect with generator.engine=sglang, whose server chooses "
            "its own (generator.sglang.args); set generator.device=auto"
        )
    if c.model.router_dtype == "float32" and c.model.dtype == "bfloat16":
        yield (
            "model.router_dtype=float32 is what SGLang does not do: its routers compute in the model's dtype, as the "
            "family has it, and would choose other experts than the learner's; set model.router_dtype=checkpoint, or "
            "generator.engine=torch"
        )
    yield from _urls(c)
    yield from _started(c)
    yield from _waits(c)


def notes(c: Config) -> Iterator[str]:
    """One sentence per setting of servers that has no effect; in a base config for another engine that is no error."""
    changed = _changed(c.generator.sglang)
    if c.generator.engine == "torch":
        yield from _unused(c, changed, "generator.engine=torch", "generator.engine=sglang")
    elif c.generator.sglang.urls:
        started = [key for key in changed if key in _STARTED]
        yield from _unused(c, started, "generator.sglang.urls, whose servers run already", "generator.sglang.urls=[]")


def _changed(section: object) -> list[str]:
    """Keys of a section that are not at their defaults."""
    fresh = type(section)()
    return [key for key in type(section).model_fields if getattr(section, key) != getattr(fresh, key)]  # type: ignore[attr-defined]


def _unused(c: Config, keys: Sequence[str], reason: str, remedy: str) -> Iterator[str]:
    for key in keys:
        value = _shown(getattr(c.generator.sglang, key))
        yield f"generator.sglang.{key}={value} has no effect with {reason}; set {remedy} to use it"


def _shown(value: object) -> str:
    """A value as an override would have it."""
    if value is None:
        return "null"
    return "[" + ",".join(map(str, value)) + "]" if isinstance(value, tuple) else str(value)


def _carrier(c: Config) -> Iterator[str]:
    w, engine = c.weights, c.generator.engine
    if engine == "sglang" and w.carrier in ("shm", "zmq"):
        yield (
            f"weights.carrier={w.carrier} brings tensors to the generator, which cannot hand them to an SGLang server "
            "(generator.engine=sglang); set weights.carrier=collective, or disk on a file system that all hosts share"
        )
    if engine == "torch" and w.carrier == "collective":
        yield (
            "weights.carrier=collective is for SGLang servers, and generator.engine=torch is in no process group; set "
            "weights.carrier=shm, or zmq for other hosts"
        )
    for key, carriers in _CARRIERS.items():
        value, default = getattr(w, key), type(w).model_fields[key].default
        if value != default and w.carrier not in carriers:
            yield (
                f"weights.{key}={value} has no effect with weights.carrier={w.carrier}; set weights.carrier="
                f"{' or '.join(carriers)}, or weights.{key}={_shown(default)}"
            )


def _quantize(c: Config) -> Iterator[str]:
    if c.weights.quantize == "none":
        return
    setting = f"weights.quantize={c.weights.quantize}"
    if c.generator.engine != "sglang":
        yield f"{setting} is for SGLang servers; set generator.engine=sglang, or weights.quantize=none"
    if c.model.dtype != "bfloat16":
        yield (
            f"{setting} goes with bfloat16, in which such a server keeps the rest, and not with "
            f"model.dtype={c.model.dtype}; set model.dtype=bfloat16, or weights.quantize=none"
        )
    if c.generator.model is None:
        yield (
            f"{setting} needs servers that were started from an FP8 checkpoint of the model; set generator.model to "
            "its folder, or weights.quantize=none"
        )


def _urls(c: Config) -> Iterator[str]:
    urls, count = c.generator.sglang.urls, c.generator.count
    if not urls:
        return
    for url in urls:
        why = _why_no_url(url)
        if why:
            # What stands before an @ would be a password.
            shown = repr(url) if "@" not in url else "one with user and password"
            yield f"generator.sglang.urls: {shown} {why}; give http://HOST:PORT, as http://10.0.0.7:30000"
    plain = [url.rstrip("/").lower() for url in urls]
    for url in sorted({url for url in plain if plain.count(url) > 1}):
        yield (
            f"generator.sglang.urls names {url} twice: two generators would update the same server; give each one a "
            "server of its own"
        )
    if len(urls) < count:
        yield (
            f"generator.sglang.urls={_shown(urls)} has {len(urls)} servers for generator.count={count}; add the "
            f"others, or set generator.count={len(urls)}"
        )


def _why_no_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        return f"is no address ({exc})"
    if parts.scheme not in ("http", "https"):
        return "does not begin with http://"
    if not parts.hostname or port is None:
        return "names no host and port"
    if parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        return "has more than host and port"
    return "has port 0" if port == 0 else ""


def _started(c: Config) -> Iterator[str]:
    """Rules of servers that are started."""
    s = c.generator.sglang
    if not s.command or not all(s.command):
        yield (
            f"generator.sglang.command={_shown(s.command)} runs nothing; set it to [python,-m,sglang.launch_server], "
            "or to a program of yours that takes its flags"
        )
    names = [key.replace("_", "-") for key in s.args]
    for key, name in zip(s.args, names, strict=True):
        yield from _flag(c, key, name)
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"generator.sglang.args has {name} twice; give it once"
    if s.first_gpu and not s.gpus:
        yield (
            f"generator.sglang.first_gpu={s.first_gpu} has no effect with generator.sglang.gpus=0; set "
            "generator.sglang.gpus to the GPUs of one server, or first_gpu=0"
        )
    if s.gpus and "CUDA_VISIBLE_DEVICES" in s.env:
        yield (
            f"generator.sglang.env.CUDA_VISIBLE_DEVICES and generator.sglang.gpus={s.gpus} both say which GPUs a "
            "server gets; set gpus=0, or leave the variable out"
        )
    for key, why in _ENV.items():
        if key in s.env:
            yield f"generator.sglang.env.{key}={s.env[key]}: {why}; leave it out"
    if s.port and s.port + max(0, c.generator.count - 1) > 65535:
        yield (
            f"generator.sglang.port={s.port} leaves no port for each of generator.count={c.generator.count} servers; "
            f"set generator.sglang.port <= {65536 - c.generator.count}"
        )


def _waits(c: Config) -> Iterator[str]:
    """A run must not end while its servers load."""
    limit = c.generator.sglang.start_timeout_s
    for key, value in (
        ("run.watchdog_s", c.run.watchdog_s),
        ("learner.take_timeout_s", c.learner.take_timeout_s),
    ):
        if value <= limit:
            yield (
                f"{key}={value:g} is not longer than generator.sglang.start_timeout_s={limit:g}: the run would end "
                f"while its servers load; set {key} > {limit:g}, or lower generator.sglang.start_timeout_s"
            )


def _flag(c: Config, key: str, name: str) -> Iterator[str]:
    setting = f"generator.sglang.args.{key}"
    if not name or name.startswith("-") or name.split() != [name] or "=" in name:
        yield f"{setting}: a flag is written without `--`, blanks and `=`, as tp-size: 4"
        return
    if name == "dtype" and c.weights.quantize != "none":
        return
    # argparse takes an abbreviation for the flag that it begins.
    meant = [flag for flag in _FLAGS if flag == name] or [flag for flag in _FLAGS if flag.startswith(name)]
    if meant:
        yield f"{setting}={c.generator.sglang.args[key]} would override what the run sets; {_FLAGS[meant[0]]}"
