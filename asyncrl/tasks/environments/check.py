"""Whether an environment can be used, found out in a process of its own before anything of a run starts."""

from __future__ import annotations

from asyncrl.errors import TaskError
from asyncrl.tasks.environments.pool import START_S
from asyncrl.tasks.processes import Child, first_word


def check(environment: str, memory_bytes: int, timeout_s: float = START_S) -> None:
    """Import `module:Class` in a worker, as the run will. Raises TaskError: key, value, reason and remedy."""
    key = f"task.environment={environment}"
    child = Child("asyncrl.tasks.environments.worker", environment, str(memory_bytes))
    first = first_word(child, key, memory_bytes, timeout_s)
    if "failed" in first:
        raise TaskError(
            f"{key}: {first['failed']}; name a class with step(self, text) as package.module:Class, importable from "
            "the folder in which asyncrl is started (docs/environments.md)"
        )
