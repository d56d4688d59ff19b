from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from asyncrl.errors import TaskError
from asyncrl.tasks.text import Decoder, load_tokenizer


def test_special_tokens_leave_no_text(model_dir: Path) -> None:
    decoder = Decoder(model_dir)
    assert decoder.decode(np.array([12, 2, 14, 5, 15, 5, 1], np.int32)) == "+0=3#3"
    assert decoder.decode([15, 5, 1, 0, 0]) == "#3"
    assert decoder.decode([]) == ""
    assert decoder.decode_many([[15, 5, 1], np.array([15, 13, 6, 1], np.int32), []]) == ["#3", "#-4", ""]


def test_decoding_takes_ids_as_sampled_when_encoding_is_not_one_to_one(tmp_path: Path) -> None:
    """Field case B20: [3, 4] decodes to the text that encodes to [7]; only the ids are the truth."""
    vocab = {"x": 0, "y": 1, "z": 2, "a": 3, "b": 4, "c": 5, "d": 6, "ab": 7}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Decoder(tmp_path).decode([3, 4]) == Decoder(tmp_path).decode([7]) == "ab"
    assert load_tokenizer(tmp_path).encode("ab").ids == [7]


def test_saved_padding_and_truncation_are_off(model_dir: Path) -> None:
    tokenizer = load_tokenizer(model_dir)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(model_dir / "tokenizer.json"))
    assert json.loads((model_dir / "tokenizer.json").read_text())["truncation"]["max_length"] == 2
    assert load_tokenizer(model_dir).encode("1+2=").ids == [3, 12, 4, 14]


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"tokenizer\.json.*does not exist"):
        Decoder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TaskError, match=r"tokenizer\.json.*is not a tokenizer"):
        Decoder(tmp_path)
