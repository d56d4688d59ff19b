"""Which folders speak of the same tokens."""

import json

import pytest

from asyncrl.errors import ConfigError
from asyncrl.models.vocabulary import vocabulary_difference


def folder(path, size=8, vocab=None, added=()):
    """A model folder as far as vocabularies go."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"vocab_size": size, "num_hidden_layers": 1}))
    if vocab is not None:
        content = {"model": {"vocab": vocab}, "added_tokens": [{"id": i, "content": t} for i, t in added]}
        (path / "tokenizer.json").write_text(json.dumps(content))
    return path


def test_the_same_ids_are_the_same_tokens_and_unused_ones_do_not_count(tmp_path):
    a = folder(tmp_path / "a", vocab={"x": 0, "y": 1})
    assert vocabulary_difference(a, a) == ""
    # Another order in the file, and a token that the other model has no name for.
    b = folder(tmp_path / "b", vocab={"y": 1, "x": 0}, added=[(7, "<think>")])
    assert vocabulary_difference(a, b) == vocabulary_difference(b, a) == ""
    # Unigram: a list of tokens with their scores.
    c = folder(tmp_path / "c", vocab=[["x", -1.0], ["y", -2.0]])
    assert vocabulary_difference(a, c) == ""
    assert vocabulary_difference(a, folder(tmp_path / "d")) == "", "nothing to compare"


def test_what_differs_is_said(tmp_path):
    a = folder(tmp_path / "a", vocab={"x": 0, "y": 1})
    assert vocabulary_difference(a, folder(tmp_path / "b", size=9)) == "9 tokens against 8"
    swapped = folder(tmp_path / "c", vocab={"x": 1, "y": 0})
    assert vocabulary_difference(a, swapped) == "id 0 is 'y' against 'x', and so on for 2 of 2 ids"
    named = folder(tmp_path / "d", vocab={"x": 0, "y": 1}, added=[(1, "<end>")])
    assert vocabulary_difference(a, named) == "id 1 is '<end>' against 'y', and so on for 1 of 2 ids"


@pytest.mark.parametrize("text", ["{", '{"model": {}}', '{"model": {"vocab": {"x": "one"}}}'])
def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path, text):
    a, b = (folder(tmp_path / name, vocab={"x": 0}) for name in "ab")
    (b / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"b/tokenizer\.json cannot be read"):
        vocabulary_difference(a, b)
