"""The verifiers that compare text, whole numbers or JSON, and what each extracts."""

from __future__ import annotations

import json

import pytest

from asyncrl.errors import TaskError
from asyncrl.tasks.rewards import VERIFIERS, judge, score, verifier
from asyncrl.tasks.rewards.schema import last_json


@pytest.mark.parametrize(
    ("text", "answer", "reward", "extracted"),
    [
        (r"\boxed{33}", "033", 1.0, "33"),
        ("Answer: 033", "33", 1.0, "33"),
        (r"\boxed{m+n=33}", "33", 1.0, "33"),
        ("Answer: 33 apples.", "33", 1.0, "33"),
        ("\\boxed{33}\n\nAnswer: ", "33", 1.0, "33"),  # nothing follows the second mark
        (r"Answer: $\boxed{33}$.", "33", 1.0, "33"),
        (r"\boxed{1} or \boxed{33}", "33", 1.0, "33"),
        (r"\boxed{33^\circ}", "33", 1.0, "33"),
        (r"\boxed{1,033}", "1033", 1.0, "1033"),
        (r"\boxed{33.0}", "33", 1.0, "33"),
        ("it is 33", "33", 0.0, ""),  # nothing counts without a mark
        ("Answer: 33 or 34", "33", 0.0, ""),
        (r"\boxed{\frac{33}{2}}", "33", 0.0, ""),
        (r"\boxed{33.5}", "33", 0.0, ""),
        (r"\boxed{33\%}", "33", 0.0, ""),
        (r"\boxed{-33}", "33", 0.0, "-33"),
        (r"\boxed{33", "33", 0.0, ""),
        ("", "33", 0.0, ""),
    ],
)
def test_integer(text: str, answer: str, reward: float, extracted: str) -> None:
    found = judge("integer", text, answer)
    assert (found.reward, found.extracted) == (reward, extracted)


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("48/2=24, so 48+24=72 #### 72", "natalia sold ... #### 72", 1.0),
        ("#### 1,072", "1072", 1.0),
        ("#### $72", "72", 1.0),
        ("#### 72\nthat is 3 a day", "72", 1.0),
        ("so it is 72 dollars", "72", 1.0),
        ("#### 72.5", "72.50", 1.0),
        ("#### 71", "72", 0.0),
        ("#### seventy-two", "72", 0.0),
        ("72 or 73", "72", 0.0),
        ("", "72", 0.0),
    ],
)
def test_gsm8k(text: str, answer: str, reward: float) -> None:
    assert score("gsm8k", text, answer) == reward


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("a  b\n c", "a b c", 1.0),
        ("thinking...\nAnswer: a b c", "a b c", 1.0),
        (r"\boxed{a b c}", "a b c", 1.0),
        ("A b c", "a b c", 0.0),
        ("a b c d", "a b c", 0.0),
        ("", "", 0.0),
    ],
)
def test_exact(text: str, answer: str, reward: float) -> None:
    assert score("exact", text, answer) == reward


@pytest.mark.parametrize(
    ("text", "answer", "reward", "extracted"),
    [
        ("Answer: B", "B", 1.0, "B"),
        ("**B**", "B", 1.0, "B"),
        ("**Answer:** (b) because", "B", 1.0, "B"),
        (r"\boxed{\text{(B)}}", "(B)", 1.0, "B"),
        ("The answer is B.", "B", 1.0, "B"),
        ("Option A looks right, but option B is.", "B", 1.0, "B"),
        ("neither (A) nor (C), so (B)", "B", 1.0, "B"),
        ("b", "B", 1.0, "B"),
        ("B.", "B", 1.0, "B"),
        ("Answer: C", "B", 0.0, "C"),
        ("A dog bit a man", "A", 0.0, ""),  # a word is no choice
        ("Answer: Bob", "B", 0.0, ""),
        ("", "B", 0.0, ""),
        ("Answer: Bob Smith", "Bob  Smith", 1.0, "Bob Smith"),  # the choice itself, not its letter
        ("Answer: Bob", "Bob Smith", 0.0, "Bob"),
    ],
)
def test_choice(text: str, answer: str, reward: float, extracted: str) -> None:
    found = judge("choice", text, answer)
    assert (found.reward, found.extracted) == (reward, extracted)


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "ages": {"type": "array", "items": {"$ref": "#/$defs/age"}}},
        "required": ["name"],
        "additionalProperties": False,
        "$defs": {"age": {"type": "integer", "minimum": 0}},
    }
)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ('{"name": "x"}', 1.0),
        ('Here it is:\n```json\n{"name": "x", "ages": [1, 2]}\n```\nDone.', 1.0),
        ('{"name": 1} no, {"name": "x"}', 1.0),  # the last one counts
        ('{"name": "x"} no, {"name": 1}', 0.0),
        ('{"name": "a {\\"name\\": 1} b"}', 1.0),  # braces inside a text are text
        ('{"name": "x", "ages": [-1]}', 0.0),
        ('{"name": "x", "more": 1}', 0.0),
        ('{"name": "x"', 0.0),
        ('{"name": "x"} and {"name": ', 1.0),  # the last complete one
        ('{"name": NaN}', 0.0),
        ("[1, 2]", 0.0),
        ("name: x", 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
        ('{"a":' * 100_000, 0.0),
        ("9" * 1_000_000, 0.0),
    ],
)
def test_json_schema(text: str, reward: float) -> None:
    assert score("json_schema", text, SCHEMA) == reward


def test_documents_are_extracted_alike_and_found_whole() -> None:
    one, other = (
        judge("json_schema", '{"ages": [1], "name": "x"}', SCHEMA),
        judge("json_schema", 'so\n{"name":"x","ages":[1]}', SCHEMA),
    )
    assert one.extracted == other.extracted == '{"ages":[1],"name":"x"}'
    assert last_json('x {"a": {"b": [1]}} y') == (True, {"a": {"b": [1]}})
    assert last_json(" 7 ") == (True, 7) and last_json("so 7") == (False, None)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{", "is no JSON"),
        ("[1]", "is no JSON object"),
        ('{"type": "nonsense"}', "is no JSON schema"),
        ('{"$ref": "https://example.com/s.json"}', "refers to another"),
        ('{"properties": {"a": {"$ref": "file:///etc/passwd"}}}', "refers to another"),
        ('{"anyOf": [{"$dynamicRef": "other.json#x"}]}', "refers to another"),
    ],
)
def test_a_schema_that_is_none_or_reaches_out_is_an_error(schema: str, reason: str) -> None:
    with pytest.raises(TaskError, match=f"json_schema: .*{reason}"):
        score("json_schema", '{"a": 1}', schema)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("chain_sum", "7"), ("last_integer", "7"), ("math", "7"), ("math", r"\sqrt{2}"), ("integer", "7"),
        ("gsm8k", "so #### 7"), ("exact", "a b"), ("choice", "B"), ("json_schema", '{"type": "integer", "default": 7}'),
        ("json_schema", '{"required": ["a"], "type": "object", "examples": [{"a": 1}]}'),
    ],
)  # fmt: skip
def test_the_gold_response_of_every_verifier_earns_1_and_junk_earns_0(name: str, answer: str) -> None:
    assert score(name, verifier(name).gold(answer), answer) == 1.0
    for junk in ("", None, " ", "none of it", "#", "{}x", "\\boxed{}", "Answer:", "####", "\x00\ufffd", "()" * 200):
        if (name, junk) != ("json_schema", "{}x"):
            assert score(name, junk, answer) == 0.0, junk


@pytest.mark.parametrize(("name", "answer"), [("integer", "x"), ("integer", "1/2"), ("gsm8k", "none")])
def test_a_gold_answer_that_a_verifier_cannot_read_is_an_error(name: str, answer: str) -> None:
    with pytest.raises(TaskError, match=f"{name}: the gold answer"):
        score(name, "\\boxed{7}", answer)


@pytest.mark.parametrize("name", sorted(VERIFIERS))
def test_long_and_odd_texts_take_little(name: str) -> None:
    """Field case B63: every search is linear. A quadratic one would overrun the test's own limit by hours."""
    answer = '{"type": "object"}' if name == "json_schema" else "7"
    for text in (
        "answer " * 50_000, "Answer:" + "\n" * 250_000, "\\boxed{" * 40_000, "(" * 250_000, "#" * 250_000,
        "1," * 125_000, "- " * 125_000, "answer is " * 25_000, "{" * 250_000, "Answer: " + "a " * 125_000,
        "\\" * 250_000, "1 000" * 50_000, "Answer: " + "1 000 " * 40_000,
    ):  # fmt: skip
        assert score(name, text, answer) in (0.0, 1.0)
