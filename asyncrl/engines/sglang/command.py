"""The command line and the environment of a server of our own. Pure: values in, values out."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence

from asyncrl.errors import ConfigError

Value = str | int | float | bool

_UNSET = ("SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_MAX_NEW_TOKENS_LIMIT")
"""A user's shell may have these for other servers: log-probs at another temperature, responses cut without a word."""


def program(command: Sequence[str]) -> list[str]:
    """generator.sglang.command with `python` as the interpreter that runs this; paths stay as they are written."""
    return [sys.executable if command[0] == "python" else command[0], *command[1:]]


def flags(
    model_path: str, *, dtype: str | None, seed: int, return_routes: bool, args: Mapping[str, Value]
) -> list[str]:
    """What a server is told beside its address and keys. args: generator.sglang.args; they come last.

    dtype None leaves it to the checkpoint, as a quantised one needs.
    """
    ours: dict[str, Value] = {"model-path": model_path, "random-seed": seed}
    if dtype is not None:
        ours["dtype"] = dtype
    ours["enable-return-routed-experts"] = return_routes
    return [*_words(ours), *_words(args)]


def _words(args: Mapping[str, Value]) -> list[str]:
    words: list[str] = []
    for key, value in args.items():
        if value is False:
            continue
        words += [f"--{key}"] if value is True else [f"--{key}", str(value)]
    return words


def environment(
    base: Mapping[str, str], extra: Mapping[str, str], *, loopback: bool, gpus: str | None
) -> dict[str, str]:
    """Environment of a server: base, then what is ours to say, then extra (generator.sglang.env).

    loopback: its process groups stay on this host. gpus: for CUDA_VISIBLE_DEVICES, None leaves that alone.
    """
    # Without these, OpenMP threads of busy processes spin each other to a standstill.
    ours = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "PYTHONUNBUFFERED": "1"}
    if loopback:
        # Gloo would take the interface of the host's name, which may not be reachable, or open to others.
        ours["GLOO_SOCKET_IFNAME"] = "lo"
    found = ours | {name: value for name, value in base.items() if name not in _UNSET}
    if gpus is not None:
        found["CUDA_VISIBLE_DEVICES"] = gpus
    return found | dict(extra)


def visible_gpus(count: int, first: int, index: int, visible: str | None) -> str | None:
    """CUDA_VISIBLE_DEVICES of the index-th server on a host: `count` GPUs, from number `first` on for the first server.

    visible: what this process may see (CUDA_VISIBLE_DEVICES, None when unset); its n-th entry is then GPU n. None when
    count is 0. ConfigError when there are not as many.
    """
    if not count:
        return None
    begin = first + index * count
    if visible is None:
        return ",".join(str(n) for n in range(begin, begin + count))
    have = [word.strip() for word in visible.split(",") if word.strip()]
    if len(have) < begin + count:
        raise ConfigError(
            f"generator.sglang.gpus={count} with first_gpu={first} gives the server number {index} on this host the "
            f"GPUs {begin} to {begin + count - 1}, but CUDA_VISIBLE_DEVICES={visible} has {len(have)}; lower "
            "generator.sglang.gpus or first_gpu, or set gpus=0 to leave that variable alone"
        )
    return ",".join(have[begin : begin + count])


def number_of(generator_id: str) -> int | None:
    """3 for `g3` and `host-g3`; None for an id without a number of its own, as `host-12345` (a process id)."""
    found = re.search(r"[A-Za-z](\d{1,4})$", generator_id)
    return int(found[1]) if found else None


def url_of(urls: Sequence[str], generator_id: str, generators: int) -> str:
    """The running server of a generator: the fourth url for `g3`. generators: how many there are (generator.count).

    ConfigError when the id has no number, or no url.
    """
    if len(urls) == 1 and generators <= 1:
        return urls[0]
    number = number_of(generator_id)
    if number is None:
        raise ConfigError(
            f"generator id {generator_id!r} does not say which of the {len(urls)} generator.sglang.urls is its server; "
            "give it one that ends with a letter and a number: --id g0 for the first url, g1 for the second"
        )
    if number >= len(urls):
        raise ConfigError(
            f"generator id {generator_id!r} has no server: generator.sglang.urls={list(urls)} has {len(urls)}; add the "
            f"url of its server, or give it an id from g0 to g{len(urls) - 1}"
        )
    return urls[number]
