from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.errors import TaskError
from asyncrl.tasks.base import Item, check_disjoint, make_prompts, prompt_id, read_stop_token_ids
from tests.tasks.conftest import write_tokenizer


def test_prompt_ids_are_fixed_by_source_and_text() -> None:
    # xxh3-64 of b"3+4=", seed 0: must never change, runs resume by these ids
    assert prompt_id("chain_sum", "3+4=") == "chain_sum-3236efb0534864b0"
    assert prompt_id("other", "3+4=") == "other-3236efb0534864b0"
    assert prompt_id("chain_sum", "4+3=") != prompt_id("chain_sum", "3+4=")


def test_prompts_carry_ids_without_special_tokens(model_dir: Path) -> None:
    (prompt,) = make_prompts("chain_sum", [Item("9-1=", "8")], model_dir)
    assert prompt.token_ids.tolist() == [11, 13, 3, 14]
    assert (prompt.text, prompt.answer, prompt.source) == ("9-1=", "8", "chain_sum")


def test_a_text_the_tokenizer_cannot_write_is_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="cannot encode chain_sum"):
        make_prompts("chain_sum", [Item("2*3=", "6")], model_dir)
    lossy = tmp_path / "lossy"
    lossy.mkdir()
    write_tokenizer(lossy, ["<pad>", "<eos>", "<unk>", *"0123456789+"])
    data = json.loads((lossy / "tokenizer.json").read_text())
    data["model"]["unk_token"] = "<unk>"
    (lossy / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(TaskError, match=r"'2\+3=' comes back as '2\+3<unk>'"):
        make_prompts("chain_sum", [Item("2+3=", "5")], lossy)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 2}, {"eos_token_id": 1}, (2,)),
        ({"eos_token_id": [2, 7]}, {"eos_token_id": 1}, (2, 7)),
        ({"eos_token_id": None}, {"eos_token_id": 0}, (0,)),
        (None, {"eos_token_id": [5, 5]}, (5,)),
    ],
)
def test_stop_tokens(tmp_path: Path, generation: dict | None, config: dict, expected: tuple[int, ...]) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_stop_token_ids(tmp_path) == expected


@pytest.mark.parametrize("text", ["{}", '{"eos_token_id": []}', '{"eos_token_id": "</s>"}', "[]", "{"])
def test_a_folder_without_stop_token_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(TaskError):
        read_stop_token_ids(tmp_path)


def test_overlap_and_repeats_are_refused() -> None:
    a, b, c = Item("1+1=", "2"), Item("1+2=", "3"), Item("1+3=", "4")
    check_disjoint("t", [a, b], [c])
    with pytest.raises(TaskError, match=r"'t': 1 held-out prompts are also training prompts, for example '1\+2='"):
        check_disjoint("t", [a, b], [b, c])
    with pytest.raises(TaskError, match="1 of 2 training prompts repeat"):
        check_disjoint("t", [a, a], [c])
    with pytest.raises(TaskError, match="1 of 2 held-out prompts repeat"):
        check_disjoint("t", [a], [c, c])


@pytest.mark.parametrize(
    ("code", "banned"),
    [
        ("import asyncrl.tasks.worker, asyncrl.tasks.rewards", ["torch", "transformers", "numpy", "reasoning_gym"]),
        ("import asyncrl.tasks.pool, asyncrl.tasks.text", ["torch", "transformers", "reasoning_gym"]),
        (
            "from asyncrl.sections.task import TaskSection\nfrom asyncrl.tasks.chain_sum import build_items\n"
            "build_items(TaskSection(train_size=4, eval_size=4))\nimport asyncrl.tasks.gate",
            ["torch", "transformers"],
        ),
    ],
)
def test_tasks_load_nothing_heavy(code: str, banned: list[str]) -> None:
    check = f"{code}\nimport sys\nprint([m for m in {banned} if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", check],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert out.stdout.strip() == "[]"
