"""The quickstart's model after a few seconds of warm start: whole runs with some reward, quickly."""

from __future__ import annotations

from pathlib import Path

from warm_start import Recipe, make_model, save, train

from asyncrl.sections.task import TaskSection
from asyncrl.tasks.chain_sum import demonstrations


def save_char_model(folder: Path, steps: int = 200, seed: int = 0) -> Path:
    """Write a barely trained model of chain_sum into folder and return it."""
    model = make_model(seed)
    if steps:
        train(
            model,
            demonstrations(TaskSection(max_terms=3, train_size=1000, eval_size=8)),
            Recipe(seed=seed, steps=steps, batch=16),
        )
    folder.mkdir(parents=True)
    save(model, folder)
    return folder
