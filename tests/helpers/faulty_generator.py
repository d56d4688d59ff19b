"""A real `asyncrl generate` process whose engine has a fault, for the drift sentinel.

    python -m tests.helpers.faulty_generator FAULT [--until-resync] CONFIG... --id ID [key=value...]

FAULT: stale:N (weights N updates older than their label), never (those of the model folder for good), int4 and fp8
(fake-quantised weights), noise:S (normal noise of that size on the router logits), swap (two experts of every MoE layer
change places, their routers do not); several joined by +, none for none. @FILE: what stands there at every load.
--until-resync: a re-sync cures it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from asyncrl import cli
from asyncrl.engines import torch_engine
from asyncrl.models.names import stream
from asyncrl.types import Version
from asyncrl.weights.reader import Reader

Weights = dict[str, Tensor]


HISTORY = 40
"""Versions that are kept, to be stale by."""


@dataclass
class Fault:
    """What is wrong with this process. spec: as on the command line."""

    spec: str
    until_resync: bool
    cured: bool = False
    start: Weights = field(default_factory=dict)
    history: list[tuple[Version, Weights]] = field(default_factory=list)
    noise: float = 0.0

    def kinds(self) -> dict[str, float]:
        """Sizes by kind."""
        text = Path(self.spec[1:]).read_text().strip() if self.spec.startswith("@") else self.spec
        parts = [part.partition(":") for part in text.split("+") if part != "none"]
        return {} if self.cured else {kind: float(size or 0) for kind, _, size in parts}

    def weights(self, version: Version, good: Weights) -> Weights:
        """What is loaded in the place of `good`, which is labelled `version` all the same."""
        kinds = self.kinds()
        self.noise = kinds.get("noise", 0.0)
        self.history = [*self.history, (version, {n: w.clone() for n, w in good.items()})][-HISTORY:]
        if "never" in kinds:
            good = self.start
        if "stale" in kinds:
            old = [w for v, w in self.history if v.update <= version.update - kinds["stale"]]
            good = old[-1] if old else self.history[0][1]
        if "swap" in kinds:
            good = swapped(good)
        for kind, rounded in (("fp8", fp8), ("int4", int4)):
            if kind in kinds:
                good = {n: rounded(w) if is_linear(n, w) else w for n, w in good.items()}
        return good


def is_linear(name: str, weight: Tensor) -> bool:
    """True for what engines quantise: matrices, but no router and no embedding."""
    return weight.dim() == 2 and "embed" not in name and not name.endswith("mlp.gate.weight")


def int4(weight: Tensor) -> Tensor:
    """Rounded to 15 levels per 32 numbers of a row."""
    parts = weight.float().unflatten(1, (-1, 32))
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 7
    return ((parts / scale).round() * scale).flatten(1).to(weight.dtype)


def fp8(weight: Tensor) -> Tensor:
    """Rounded to float8_e4m3fn with a scale per row."""
    scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
    return ((weight.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)


def swapped(good: Weights) -> Weights:
    """Experts 0 and 1 in each other's place."""
    out = dict(good)
    for name in good:
        if ".experts.0." in name:
            other = name.replace(".experts.0.", ".experts.1.")
            out[name], out[other] = good[other], good[name]
    assert any(out[name] is not good[name] for name in good), "no experts to swap"
    return out


def make_noisy(model: torch.nn.Module, fault: Fault) -> None:
    """Every router of the model adds the fault's noise to its logits, and routes by what comes out."""
    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    assert routers, "the model has no routers"

    def noisy(router: torch.nn.Module) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        sound = router.forward

        def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            if not fault.noise:
                return sound(x)
            logits = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), router.weight)
            logits = logits + fault.noise * torch.randn_like(logits)
            weights, index = logits.float().softmax(-1).topk(router.top_k, dim=-1)
            if router.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights.to(x.dtype), index

        return forward

    for router in routers:
        router.forward = noisy(router)


class FaultySource:
    """A version as an engine gets it, with the fault."""

    kind = "tensors"

    def __init__(self, source, version: Version, fault: Fault) -> None:
        self._source, self._version, self._fault = source, version, fault

    def tensors(self) -> Weights:
        return self._fault.weights(self._version, dict(self._source.tensors()))


def install(fault: Fault) -> None:
    """Put the fault into this process."""
    load, load_model, forget = torch_engine.TorchEngine.load, torch_engine.load_model, Reader.forget

    async def faulty_load(self, version, source):
        await load(self, version, FaultySource(source, version, fault))

    def faulty_model(*args, **kwargs):
        model = load_model(*args, **kwargs)
        fault.start = {name: tensor.clone() for name, tensor in stream(model)}
        make_noisy(model, fault)
        return model

    def cured(self):
        fault.cured = fault.cured or fault.until_resync
        forget(self)

    torch_engine.TorchEngine.load, torch_engine.load_model, Reader.forget = faulty_load, faulty_model, cured


def main() -> None:
    rest = sys.argv[2:]
    install(Fault(sys.argv[1], "--until-resync" in rest))
    sys.argv = ["asyncrl", "generate", *[a for a in rest if a != "--until-resync"]]
    cli.main()


if __name__ == "__main__":
    main()
