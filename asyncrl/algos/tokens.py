"""What surrogates share: their result, and the guards around it. Knows no method.

Axes: B responses, T positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from asyncrl.algos.ratio import at_least_float32, bounded_exp


class TokenLoss(NamedTuple):
    """Result of a surrogate. loss: [B, T]; the loss of a token has a gradient at this token alone, because corrections
    weigh token by token (`mean_ratio` for methods with one ratio per response). clipped: bool [B, T], where its bounds
    cut something; nowhere with advantage 0.
    """

    loss: torch.Tensor
    clipped: torch.Tensor


def check_bounds(eps_low: float, eps_high: float, most_low: float = 1.0) -> None:
    """Raise ValueError unless 0 <= eps_low <= most_low and eps_high >= 0. most_low is 1 for bounds of a ratio."""
    if not 0 <= eps_low <= most_low or not eps_high >= 0:
        raise ValueError(f"eps_low={eps_low} must be in [0, {most_low:g}] and eps_high={eps_high} >= 0")


def per_token(advantages: torch.Tensor, like_BT: torch.Tensor) -> torch.Tensor:
    """Advantages [B] or [B, T] as constants [B, T] in the type of like_BT. Raises ValueError for another shape."""
    advantages = at_least_float32(advantages.detach()).to(like_BT.dtype)
    if advantages.shape == like_BT.shape[:1]:
        return advantages[:, None].expand_as(like_BT)
    if advantages.shape == like_BT.shape:
        return advantages
    raise ValueError(f"advantages must be [B] or [B, T] = {list(like_BT.shape)}, got {list(advantages.shape)}")


def counted(mask: torch.Tensor | None, like_BT: torch.Tensor) -> torch.Tensor:
    """bool [B, T]: where a token counts; everywhere without a mask."""
    return torch.ones_like(like_BT, dtype=torch.bool) if mask is None else mask != 0


def response_mean(values_BT: torch.Tensor, counted_BT: torch.Tensor) -> torch.Tensor:
    """Mean over the counted tokens of each response [B, 1]; 0 for a response without any."""
    total_B1 = torch.where(counted_BT, values_BT, 0.0).sum(dim=1, keepdim=True)
    return total_B1 / counted_BT.sum(dim=1, keepdim=True).clamp(min=1)


def mean_ratio(log_ratio_BT: torch.Tensor, counted_BT: torch.Tensor) -> torch.Tensor:
    """exp of the mean log-ratio of each response, at every token of it [B, T]; the exponent is clamped to +-20.

    The gradient of the mean is shared out: at each token it is that of its own log-ratio alone, T times its part in the
    mean. Added up over a response it is the same; but when a token's loss is weighed or left out, its gradient goes
    with it, where a mean would pass it on through the losses of the others.
    """
    mean_B1 = response_mean(log_ratio_BT.detach(), counted_BT)
    # The bracket is exactly 0, and there for its gradient.
    return bounded_exp(mean_B1 + (log_ratio_BT - log_ratio_BT.detach()))


def token_loss(
    gain_BT: torch.Tensor, broken_BT: torch.Tensor, clipped_BT: torch.Tensor, counted_BT: torch.Tensor
) -> TokenLoss:
    """The loss -gain where a token counts, NaN where its log-ratio is none, so that it is seen; 0 elsewhere.

    Neither NaN nor 0 carries a gradient.
    """
    loss = torch.where(broken_BT, float("nan"), -gain_BT)
    return TokenLoss(torch.where(counted_BT, loss, 0.0), clipped_BT & counted_BT & ~broken_BT)
