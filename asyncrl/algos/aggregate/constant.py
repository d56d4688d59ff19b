"""Sum over the tokens, divided by a number that does not depend on the batch.

Axes: B responses.
"""

from __future__ import annotations

import torch

from asyncrl.algos.aggregate.divide import divided


def constant(sum_B: torch.Tensor, constant: float) -> torch.Tensor:
    """Sum of all token losses / constant: the lengths of the responses enter nowhere.

    sum_B: loss of each response, summed over its tokens. constant: the responses of the batch times the longest
    response allowed. Returns a scalar. Dr. GRPO (arXiv 2503.20783).
    """
    return divided(sum_B.sum(), constant)
