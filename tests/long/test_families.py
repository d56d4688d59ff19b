"""The matrix: every served MoE family of the installed transformers, and variants of its router, against every check.

A family that a new version of transformers adds fails tests/models/test_families.py until it is served or refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.models.families import SERVED
from tests.helpers import family_checks
from tests.helpers.moe_families import variants

every = pytest.mark.parametrize("family", [*SERVED, *variants()])


@every
@pytest.mark.parametrize("check", [*family_checks.LIVE, family_checks.check_engine])
def test_live_model(family: str, check: Callable[[str], object]) -> None:
    check(family)


@every
@pytest.mark.parametrize("check", family_checks.FOLDER)
def test_folder(family: str, check: Callable[[str, Path], None], tmp_path: Path) -> None:
    check(family, tmp_path)


@every
def test_learner(family: str, tmp_path: Path, world: Any) -> None:
    family_checks.check_policy(family, tmp_path, world)
