"""What aggregations share: the division by a total. Knows no method."""

from __future__ import annotations

import torch


def divided(total: torch.Tensor, count: float) -> torch.Tensor:
    """total / count, the total itself where nothing counts: the sum is 0 then, and must stay attached to the graph for
    the other ranks."""
    return total / count if count > 0 else total
