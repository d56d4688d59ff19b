"""Policy-gradient losses per token (the NEGATED objective: minimise), one file each. None knows of aggregation."""

from asyncrl.algos.surrogates.clip import clip_surrogate

__all__ = ["clip_surrogate"]
