"""Which decoder serves which model: flat for the families it knows, else the transformers module."""

from __future__ import annotations

from transformers import PreTrainedModel

from asyncrl.engines.decoder import Decoder
from asyncrl.engines.flat import FlatDecoder, why_not_flat
from asyncrl.engines.module_decoder import cached_or_recompute
from asyncrl.models.routes import RouteHook


def make_decoder(model: PreTrainedModel, hook: RouteHook | None, rows: int) -> Decoder:
    """The fastest decoder that gives the model's own logits. hook is None for a dense model."""
    if why_not_flat(model) is None:
        return FlatDecoder(model, hook, rows)
    return cached_or_recompute(model, hook, rows)
