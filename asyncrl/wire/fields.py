"""What the fields of messages share: the base struct, and the bounds of numbers and texts."""

from __future__ import annotations

from typing import Annotated

import msgspec

Number = Annotated[int, msgspec.Meta(ge=-(2**40), le=2**40)]
"""An update, version or count that replay keeps: sums of them stay far from what a snapshot can hold."""

TokenId = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
"""What fits int32."""


Name = Annotated[str, msgspec.Meta(max_length=256)]
"""Of a peer or a setting."""

GaugeName = Annotated[str, msgspec.Meta(max_length=64)]
"""Replay keeps the last gauges of every generator."""

Id = Annotated[str, msgspec.Meta(max_length=1024)]
"""Of a prompt, a group or a lease."""

Ids = Annotated[list[Id], msgspec.Meta(max_length=2**16)]

Parts = Annotated[dict[GaugeName, float], msgspec.Meta(max_length=32)]
"""Named parts of a reward."""

Text = Annotated[str, msgspec.Meta(max_length=2**16)]
"""A reason, a place or a value."""


class Struct(msgspec.Struct, array_like=True, gc=False):
    """Base of everything on the wire: fields by position, no names."""
