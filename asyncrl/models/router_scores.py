"""How a family's router scores its experts: the logarithm of these scores, from what the router returns.

Knows the formulas of asyncrl.models.families, and neither hooks nor losses. Axes: N rows, E experts.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.models.families import SERVED

ScoresKind = Literal["softmax", "sigmoid", "sqrtsoftplus", "probabilities"]


def scores_kind(config: Any) -> ScoresKind | None:
    """What the first output of a router is, by the (text) config of its model: probabilities, or logits of which the
    family takes this function. None where no formula is known, or config is no config."""
    family = SERVED.get(str(getattr(config, "model_type", "")))
    if family is None:
        return None
    if family.gives_probabilities:
        return "probabilities"
    name = family.scores_in(config.to_dict())
    return next((kind for kind in get_args(ScoresKind) if kind == name), None)


def log_scores(first_NE: Tensor, kind: ScoresKind | None) -> Tensor:
    """Log of the router's own score of every expert, float32 [N, E], without a gradient.

    first_NE: the first output of the router. softmax: over all experts, also where the family normalises over the
    chosen ones, because a change of the score of one expert must not depend on which others were chosen. Finite for
    finite logits.
    """
    x_NE = first_NE.detach().float()
    if kind == "softmax":
        return x_NE.log_softmax(dim=-1)
    if kind == "sigmoid":
        return F.logsigmoid(x_NE)
    if kind == "sqrtsoftplus":
        return _log(F.softplus(x_NE)) / 2
    if kind == "probabilities":
        return _log(x_NE)
    raise ValueError(f"no formula for router scores of kind {kind!r}")


def _log(x: Tensor) -> Tensor:
    # What underflowed to 0 has no logarithm.
    return x.clamp_min(torch.finfo(torch.float32).tiny).log()
