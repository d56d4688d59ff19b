"""An observation as the policy reads it: its text between two turns of the chat template, as token ids.

Only observations are encoded, each once and by itself: what the policy sampled stays the ids that it sampled.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from asyncrl.errors import TaskError
from asyncrl.tasks.chat import ChatTemplate
from asyncrl.tasks.text import load_tokenizer

# Private use: stand in for what was said, and no template contains them.
_QUESTION, _ANSWER, _OBSERVATION = "\ue000", "\ue001", "\ue002"


class Observations:
    """Writes the observations of one model. Without chat they stand there as they are."""

    def __init__(self, tokenizer_dir: str | Path, chat: bool) -> None:
        """Read tokenizer and chat template. Raises TaskError naming the folder."""
        self._tokenizer = load_tokenizer(tokenizer_dir)
        self._plain = load_tokenizer(tokenizer_dir)
        self._plain.encode_special_tokens = True  # the text of a special token stays text
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {number: token.content for number, token in added.items() if token.special}
        self._before, self._after = between(ChatTemplate(tokenizer_dir), str(tokenizer_dir)) if chat else ("", "")

    def encode(self, text: str, last: int) -> NDArray[np.int32]:
        """Ids [N] of an observation after a response whose last id is `last`.

        A special token in the text is written as the characters that it is made of: a tool cannot end a message.
        Raises TaskError when the tokenizer cannot write the text.
        """
        before = self._before
        # The policy has ended its message itself.
        if (end := self._special.get(last, "")) and before.startswith(end):
            before = before[len(end) :]
        pieces = [(self._tokenizer, before + text + self._after)]
        if any(token in text for token in self._special.values()):
            pieces = [(self._tokenizer, before), (self._plain, text), (self._tokenizer, self._after)]
        ids = [number for tokenizer, piece in pieces for number in _encode(tokenizer, piece)]
        return np.asarray(ids, np.int32)


def between(render: ChatTemplate, folder: str) -> tuple[str, str]:
    """The template's text (before, after) an observation, from the end of an answer to where the next one begins.

    Raises TaskError when the template leaves out what was said, or says it in another order.
    """
    text = render.conversation([("user", _QUESTION), ("assistant", _ANSWER), ("user", _OBSERVATION)])
    _, answer, rest = text.partition(_ANSWER)
    before, observation, after = rest.partition(_OBSERVATION)
    if not answer or not observation or _OBSERVATION in after:
        raise TaskError(
            f"the chat template of {folder!r} does not write a second message of the user once, after the answer; set "
            "task.chat=false"
        )
    return before, after


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    if not text:
        return []
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    except Exception as exc:  # the library raises a bare Exception for every failure
        raise TaskError(f"the tokenizer cannot write the observation {text[:60]!r}: {exc}") from exc
    return ids
