"""What the model reads for a question: the task's template, then the chat template of the model folder.

Chat templates are Jinja and belong to the model folder, so they run in Jinja's sandbox. Rendered as transformers
does it, but for the clock: a template that asks for today's date takes its own default, so that prompts and their
ids are the same every day. Knows nothing of items or rewards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from asyncrl.errors import TaskError
from asyncrl.tasks.text import load_tokenizer

QUESTION = "{question}"
PLAIN = QUESTION

_MARK = "\ue000"  # private use: stands in for the question, and no template contains it

Writer = Callable[[str], str]
"""Question -> the whole prompt as text."""


Teller = Callable[[Sequence[tuple[str, str]]], str]
"""(role, content) messages -> the whole prompt as text."""


def teller(chat: bool, model_dir: str | Path, system: bool = False) -> Teller:
    """Messages to the model's chat template, or without chat to their contents, an empty line between them.

    system: whether conversations have a system message. Raises TaskError when the folder has no usable chat template,
    or one that leaves a message out.
    """
    if not chat:
        return lambda messages: "\n\n".join(content for _, content in messages)
    tell = ChatTemplate(model_dir).conversation
    if _MARK not in tell([("user", _MARK)]):
        raise TaskError(f"the chat template of {str(model_dir)!r} leaves the user's message out; set task.chat=false")
    if system and _MARK not in tell([("system", _MARK), ("user", "hello")]):
        raise TaskError(
            f"the chat template of {str(model_dir)!r} leaves the system message out; set task.system_prompt=null and "
            "write it into task.template"
        )
    return tell


def writer(template: str, chat: bool, model_dir: str | Path, system_prompt: str | None = None) -> Writer:
    """Put a question into `template` and, with chat, that as a user's message into the model's chat template.

    Raises TaskError when the folder has no usable chat template, or one that leaves the message out.
    """
    if not chat:
        return lambda question: template.replace(QUESTION, question)
    tell = teller(chat, model_dir, system_prompt is not None)
    before = [("system", system_prompt)] if system_prompt is not None else []
    return lambda question: tell([*before, ("user", template.replace(QUESTION, question))])


def longest(write: Writer, characters: int, model_dir: str | Path) -> int:
    """Bound on the tokens of a prompt whose question has at most `characters`: one for each, and the text around it."""
    around = write(_MARK).split(_MARK)
    tokens = 0
    if any(around):
        tokenizer = load_tokenizer(model_dir)
        tokens = sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in around)
    return tokens + (len(around) - 1) * characters


class ChatTemplate:
    """The chat template of a model folder: chat_template.jinja, else `chat_template` of tokenizer_config.json."""

    def __init__(self, model_dir: str | Path) -> None:
        """Read and compile it. Raises TaskError naming the folder."""
        self._folder = Path(model_dir)
        config = self._read_json("tokenizer_config.json")
        self._tokens = _special_tokens({**self._read_json("special_tokens_map.json"), **config})
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(self._source(config))
        except jinja2.TemplateError as exc:
            raise TaskError(f"the chat template of {str(model_dir)!r} is broken: {exc}") from exc

    def __call__(self, message: str) -> str:
        """The text of a conversation with one message of the user, up to where the answer begins. Raises TaskError."""
        return self.conversation([("user", message)])

    def conversation(self, messages: Sequence[tuple[str, str]]) -> str:
        """The text of (role, content) messages, up to where the next answer begins. Raises TaskError."""
        try:
            return self._template.render(
                messages=[{"role": role, "content": content} for role, content in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as exc:
            said = messages[-1][1][:60]
            raise TaskError(f"the chat template of {str(self._folder)!r} failed on {said!r}: {exc}") from exc

    def _source(self, config: dict[str, Any]) -> str:
        file = self._folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        found = config.get("chat_template")
        if isinstance(found, list):  # several by name
            found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
        if not isinstance(found, str):
            raise TaskError(
                f"{str(self._folder)!r} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); set task.chat=false"
            )
        return found

    def _read_json(self, name: str) -> dict[str, Any]:
        file = self._folder / name
        if not file.is_file():
            return {}
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as exc:
            raise TaskError(f"{str(file)!r} is not JSON: {exc}") from exc
        return value if isinstance(value, dict) else {}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like, which templates may name; each is a text, or an object with one."""
    found = {k: v.get("content") if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
    return {k: v for k, v in found.items() if isinstance(v, str)}


def _to_json(value: Any, **options: Any) -> str:
    # Jinja's own escapes characters of HTML.
    return json.dumps(value, ensure_ascii=False, **options)


def _refuse(message: str) -> None:
    """raise_exception of the templates."""
    raise jinja2.TemplateError(message)


class _Generation(Extension):
    """{% generation %} marks what an assistant wrote, for training on conversations; here it means nothing."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
