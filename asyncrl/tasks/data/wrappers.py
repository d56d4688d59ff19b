"""Instructions that well-known sets write around their questions, so that one question is known in any of them."""

from __future__ import annotations

import unicodedata

WRAPPERS = (
    (  # DAPO-Math-17k and what is evaluated beside it
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.",
        'Remember to put your answer on its own line after "Answer:".',
    ),
    ("", "Let's think step by step and output the final answer within \\boxed{}."),  # verl: MATH
    ("", 'Let\'s think step by step and output the final answer after "####".'),  # verl: GSM8K
    ("", "Please reason step by step, and put your final answer within \\boxed{}."),
)


def unwrap(text: str) -> str:
    """The question inside a well-known instruction; a text without one as it is."""
    stripped = text.strip()
    for head, tail in WRAPPERS:
        if stripped.startswith(head) and stripped.endswith(tail) and len(stripped) > len(head) + len(tail):
            return stripped[len(head) : len(stripped) - len(tail)].strip()
    return text


def bare(text: str) -> str:
    """A question as it is compared: without a well-known instruction around it, without case, one blank for any.

    An accented letter is the same as one character or as two (NFC).
    """
    return unicodedata.normalize("NFC", " ".join(unwrap(text).split())).casefold()
