"""A model folder that a server can start from by itself. SGLang does not tie the output matrix of every family.

In a run it gets that matrix with the first weights; a server that is started to be evaluated gets no weights.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from asyncrl.errors import ConfigError
from asyncrl.models.describe import read_config, text_config
from asyncrl.models.folder import INDEX, weights_of
from asyncrl.models.tied import EMBEDDING, HEAD

FOLDER = "served.part"
_OWN = "output-matrix.safetensors"


@contextlib.contextmanager
def served(model: Path, out: Path) -> Iterator[Path]:
    """The folder itself, or for a tied one a folder of links in out with the embeddings as the output matrix, too."""
    config = read_config(model)
    tied = config.get("tie_word_embeddings", text_config(config).get("tie_word_embeddings")) is True
    stored = weights_of(model) if tied and not config.get("quantization_config") else {}
    if not tied or HEAD in stored or not stored:
        yield model
        return
    if EMBEDDING not in stored:
        raise ConfigError(f"{model} is tied, but has no {EMBEDDING} to serve as {HEAD}; copy the whole folder again")
    folder = out / FOLDER
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
    try:
        folder.mkdir(parents=True)
        # Readers look for a single file before they look for the index.
        names = {name: f"part-{name}" for name in {entry.file for entry in stored.values()}}
        for file in model.iterdir():
            if file.name != INDEX:
                (folder / names.get(file.name, file.name)).symlink_to(file.resolve())
        with safe_open(model / stored[EMBEDDING].file, framework="pt") as held:
            save_file({HEAD: held.get_tensor(EMBEDDING)}, folder / _OWN, metadata={"format": "pt"})
        files = {name: names[entry.file] for name, entry in stored.items()} | {HEAD: _OWN}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}), encoding="utf-8")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
