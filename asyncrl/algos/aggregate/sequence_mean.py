"""Mean over the responses of their mean over tokens.

Axes: B responses.
"""

from __future__ import annotations

import torch

from asyncrl.algos.aggregate.divide import divided


def sequence_mean(sum_B: torch.Tensor, count_B: torch.Tensor, total_sequences: float) -> torch.Tensor:
    """Sum over responses of their mean token loss / total_sequences: a response weighs the same whatever its length.

    sum_B: loss of each response, summed over its tokens. count_B: its tokens; one without any adds 0 and counts in
    total_sequences. Returns a scalar. The objective of GRPO (arXiv 2402.03300), and with one ratio per response that of
    GSPO (arXiv 2507.18071).
    """
    return divided((sum_B / count_B.clamp(min=1)).sum(), total_sequences)
