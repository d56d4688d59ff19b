"""Prompts through a template and a model folder's chat template, against transformers' own rendering."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from asyncrl import tasks
from asyncrl.errors import TaskError
from asyncrl.sections.task import TaskSection
from asyncrl.tasks.base import Item, make_prompts
from asyncrl.tasks.chain_sum import longest_prompt
from asyncrl.tasks.chat import ChatTemplate, writer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What templates of larger models do besides: loops with break, macros, special tokens, json, generation blocks.
ELABORATE = """{%- macro head(role) -%}
<|im_start|>{{ role }}
{% endmacro -%}
{{- bos_token }}
{%- if tools is not none and tools is defined %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {{- head(message.role) }}{{ message.content | trim }}{{ eos_token }}
    {%- if not loop.last %}{% break %}{% endif %}
{%- endfor %}
{%- if strftime_now is defined %}{{ strftime_now("%Y") }}{% endif %}
{%- if add_generation_prompt %}
    {{- head('assistant') }}{% generation %}{% endgeneration %}
{%- endif %}"""


def write_chat_folder(folder: Path, template: str | list | None, *, file: bool = True) -> Path:
    """A byte-level tokenizer with the two marks of ChatML, and a chat template in a file or in the config."""
    vocab = {c: i + 2 for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={"<|im_start|>": 0, "<|im_end|>": 1, **vocab}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
    }
    if template is not None and file:
        (folder / "chat_template.jinja").write_text(str(template))
    elif template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": [1, 0]}))
    return folder


TASK = TaskSection(
    min_terms=2,
    max_terms=2,
    eval_min_terms=2,
    train_size=40,
    eval_size=8,
    chat=True,
    template="Answer with the number only. {question}",
    answer="last_integer",
)


@pytest.mark.parametrize("template", [CHATML, ELABORATE], ids=["chatml", "elaborate"])
@pytest.mark.parametrize("file", [True, False], ids=["file", "config"])
def test_prompts_are_what_transformers_makes_of_the_same_message(tmp_path: Path, template: str, file: bool) -> None:
    folder = write_chat_folder(tmp_path, template.replace("strftime_now", "no_clock"), file=file)
    reference = AutoTokenizer.from_pretrained(folder)
    (prompt,) = make_prompts("last_integer", [Item("3+4=", "7")], folder, writer("Say {question}", True, folder))
    messages = [{"role": "user", "content": "Say 3+4="}]
    assert prompt.text == reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert prompt.token_ids.tolist() == ids


def test_a_template_that_asks_for_the_date_takes_its_default(tmp_path: Path) -> None:
    render = ChatTemplate(write_chat_folder(tmp_path, ELABORATE))
    assert not any(c.isdigit() for c in render("hello"))


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    assert "hello" in ChatTemplate(write_chat_folder(tmp_path, named, file=False))("hello")


def test_a_built_task_in_chat_form(tmp_path: Path) -> None:
    folder = write_chat_folder(tmp_path, CHATML)
    task = tasks.build(TASK, folder)
    assert task.stop_token_ids == (1, 0)
    assert {p.source for p in [*task.train, *task.eval]} == {"last_integer"}
    for prompt in task.train:
        assert prompt.text.startswith("<|im_start|>user\nAnswer with the number only. ")
        assert prompt.text.endswith("=<|im_end|>\n<|im_start|>assistant\n")
    assert len({p.prompt_id for p in [*task.train, *task.eval]}) == 48


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("template", ["{question}", "{question} And again: {question}"])
def test_the_bound_of_the_prompt_length_is_met(tmp_path: Path, chat: bool, template: str) -> None:
    folder = write_chat_folder(tmp_path, CHATML)
    task = TASK.model_copy(update={"chat": chat, "template": template})
    lengths = [len(p.token_ids) for p in tasks.build(task, folder).train]
    assert max(lengths) == min(lengths) == longest_prompt(task, folder)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "has no chat template"),
        ("{% for", "is broken"),
        ("{{ raise_exception('no system') }}", "failed on .*no system"),
        ("{{ messages[0].content.__class__.mro() }}", "failed on"),
        ("{{ messages.append(1) }}", "failed on"),
        ("Assistant:", "leaves the user's message out"),
    ],
)
def test_unusable_chat_templates_are_refused(tmp_path: Path, template: str | None, reason: str) -> None:
    folder = write_chat_folder(tmp_path, template)
    with pytest.raises(TaskError, match=reason):
        longest_prompt(TASK, folder)


def test_a_question_that_would_end_its_own_message_is_refused(tmp_path: Path) -> None:
    folder = write_chat_folder(tmp_path, CHATML)
    item = Item("1+1=<|im_end|>", "2")
    with pytest.raises(TaskError, match=r"contains the special token '<\|im_end\|>'"):
        make_prompts("last_integer", [item], folder, writer("{question}", True, folder))
