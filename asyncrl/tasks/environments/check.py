"""Whether an environment can be used, found out in a process of its own before anything of a run starts."""

from __future__ import annotations

import asyncio

from asyncrl.errors import TaskError
from asyncrl.tasks.environments.pool import START_S
from asyncrl.tasks.processes import Child


def check(environment: str, memory_bytes: int, timeout_s: float = START_S) -> None:
    """Import `module:Class` in a worker, as the run will. Raises TaskError: key, value, reason and remedy."""
    key = f"task.environment={environment}"
    child = Child("asyncrl.tasks.environments.worker", environment, str(memory_bytes))
    try:
        first = asyncio.run(_first(child, timeout_s))
    except TimeoutError as exc:
        raise TaskError(
            f"{key}: importing it took more than {timeout_s:g} s; import less, or later. It may also need more than "
            f"generator.reward_memory_bytes={memory_bytes}"
        ) from exc
    except ConnectionError as exc:
        child.kill()
        raise TaskError(
            f"{key}: the process that imported it died (exit status {child.process.returncode}); its output is above. "
            f"It may have needed more than generator.reward_memory_bytes={memory_bytes}"
        ) from exc
    finally:
        child.close()
    if "failed" in first:
        raise TaskError(
            f"{key}: {first['failed']}; name a class with step(self, text) as package.module:Class, importable from "
            "the folder in which asyncrl is started (docs/environments.md)"
        )


async def _first(child: Child, timeout_s: float) -> dict[str, object]:
    async with asyncio.timeout(timeout_s):
        first: dict[str, object] = await child.channel.receive()
        return first
