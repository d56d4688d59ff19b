"""What every section shares: number types, and the base that refuses unknown keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from asyncrl.suggest import in_range, meant

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(le=1_000_000)]
SEED_MAX = 2**31 - 1  # what torch, numpy and reasoning-gym all take


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _as_meant(cls, value: Any, read: Callable[[Any], Any], info: ValidationInfo) -> Any:
        return in_range(read(meant(value, cls.model_fields[str(info.field_name)].annotation)))
