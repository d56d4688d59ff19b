"""Environments of the user's for episodes of several turns, in worker processes (docs/environments.md).

`Step` is what an environment returns; the pool, the worker and the check at the start are modules of their own, so
that importing this costs an environment nothing.
"""

from __future__ import annotations

from asyncrl.tasks.environments.step import Step

__all__ = ["Step"]
