"""Mean over the tokens of the batch.

Axes: B responses.
"""

from __future__ import annotations

import torch

from asyncrl.algos.aggregate.divide import divided


def token_mean(sum_B: torch.Tensor, total_tokens: float) -> torch.Tensor:
    """Sum of all token losses / total_tokens: a token weighs the same in a long response as in a short one.

    sum_B: loss of each response, summed over its tokens. Returns a scalar. The token-level loss of DAPO (arXiv
    2503.14476).
    """
    return divided(sum_B.sum(), total_tokens)
