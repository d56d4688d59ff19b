"""Token ids to text piece by piece, and text that cannot harm what shows it."""

import pytest
from tokenizers import Tokenizer

from asyncrl.errors import TaskError
from asyncrl.samples.pieces import Pieces, Unknown, visible
from tests.samples.conftest import END


@pytest.fixture(scope="module")
def decoder(start):
    return Pieces(start)


@pytest.fixture(scope="module")
def encode(start):
    tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
    return lambda text: tokenizer.encode(text).ids


def test_a_character_of_several_tokens_is_one_piece(decoder, encode):
    ids = [*encode("a\u00e9\u65e5\U0001f600b"), END]
    pieces = decoder.of(ids)
    assert [p.text for p in pieces] == ["a", "\u00e9", "\u65e5", "\U0001f600", "b", "<|end|>"]
    assert [(p.start, p.end) for p in pieces] == [(0, 1), (1, 3), (3, 6), (6, 10), (10, 11), (11, 12)]


def test_every_token_is_in_exactly_one_piece_even_where_bytes_are_no_character(decoder, encode):
    cut = encode("\U0001f600")[:2]
    for ids in (cut, [*cut, *encode("x")], cut * 9, [*encode("ok"), *cut], [], [259, END, 258]):
        pieces = decoder.of(ids)
        assert [i for p in pieces for i in range(p.start, p.end)] == list(range(len(ids)))
    assert decoder.text(cut) == "\ufffd"
    assert decoder.text([*cut, *encode("x")]) == "\ufffdx"
    assert decoder.text([*encode("a"), 259, END]) == "a<token 259><|end|>"


def test_spaces_that_a_decoder_drops_at_a_beginning_are_kept_within():
    from tokenizers import decoders, models

    tokenizer = Tokenizer(models.WordLevel({"\u2581one": 0, "\u2581two": 1, "s": 2}, unk_token="s"))
    tokenizer.decoder = decoders.Metaspace()
    decoder = Pieces.__new__(Pieces)
    decoder._tokenizer = tokenizer
    assert [p.text for p in decoder.of([0, 1, 2, 0])] == ["one", " two", "s", " one"]


def test_without_a_tokenizer_there_are_ids(tmp_path):
    assert [p.text for p in Unknown().of([5, 70000])] == ["<5>", "<70000>"]
    with pytest.raises(TaskError, match=r"tokenizer.json' does not exist"):
        Pieces(tmp_path)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, 12 + 3 = 15.\n", "plain, 12 + 3 = 15.\n"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("a\rb\bc\x07\x00\x7f\x9b", r"a\x0db\x08c\x07\x00\x7f\x9b"),
        ("\u202eabc\u2066\u200b\ufeff", r"\u202eabc\u2066\u200b\ufeff"),
        ("a\u2028b\u2029c\x85d\x0b", r"a\u2028b\u2029c\x85d\x0b"),
        ("\u27e6obs\u27e7", r"\u27e6obs\u27e7"),
        ("\U000e0041", r"\U000e0041"),
        ("\u00e9\u65e5\U0001f600\tx", "\u00e9\u65e5\U0001f600    x"),
        ("\ud800", r"\ud800"),
    ],
)
def test_what_steers_a_terminal_is_shown_as_its_code(text, shown):
    assert visible(text) == shown
