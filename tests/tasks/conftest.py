"""A character-level tokenizer folder, as small as the tasks need it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

SYMBOLS = ["<pad>", "<eos>", *"0123456789+-=#"]


def write_tokenizer(folder: Path, symbols: list[str]) -> Path:
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in symbols if s.startswith("<")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    return folder


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path, SYMBOLS)
