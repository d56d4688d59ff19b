"""The tool on a run of seconds: files, cache, determinism, and what the demonstrations teach."""

from __future__ import annotations

import json
import random
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

from asyncrl.config import TaskSection, load_config
from asyncrl.tasks import build
from asyncrl.tasks.base import Item
from asyncrl.tasks.chain_sum import build_items, demonstrations
from asyncrl.tasks.rewards import score
from asyncrl.tasks.text import Decoder

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

import demonstrations as demos  # noqa: E402
import make_quickstart_model as tool  # noqa: E402
import warm_start  # noqa: E402

TINY = ["--steps", "12", "--batch", "8", "--min-expert-share", "0", "task.eval_size=20", "task.train_size=50"]


def text_of(ids: list[int]) -> str:
    return "".join("_" if i == demos.IGNORE else "." if i == demos.EOS else demos.SYMBOLS[i] for i in ids)


def test_a_whole_demonstration() -> None:
    shown = demos.demonstrate(Item("3+0+7-4=", "6"), random.Random(0), early=0.0)
    assert text_of(shown.ids) == "3+0+7-4=+0=3+7=10-4=6#6."
    assert text_of(shown.stop) == "________#0=3#7=10#4=6#6."
    assert text_of(shown.go) == "________+0=3+7=10-4=6#6."


def test_a_lazy_demonstration_reports_the_total_so_far() -> None:
    found = {text_of(demos.demonstrate(Item("3+0+7-4=", "6"), random.Random(s), 1.0).ids) for s in range(30)}
    assert found == {"3+0+7-4=#3.", "3+0+7-4=+0=3#3.", "3+0+7-4=+0=3+7=10#10."}
    for seed in range(30):
        shown = demos.demonstrate(Item("3+0+7-4=", "6"), random.Random(seed), early=1.0)
        differ = [i for i, (a, b) in enumerate(zip(shown.stop, shown.go, strict=True)) if a != b]
        # where a choice is left, one target is `#` and the other the sign of the next term
        assert all(text_of([shown.stop[i]]) == "#" for i in differ)
        assert [text_of([shown.go[i]]) for i in differ] == list("++-")[: len(differ)]


def test_every_whole_demonstration_earns_the_reward() -> None:
    task = TaskSection(train_size=50, eval_size=20)
    for item in islice(demonstrations(task), 200):
        shown = text_of(demos.demonstrate(item, random.Random(0), early=0.0).ids)
        assert score("chain_sum", shown.removeprefix(item.text).removesuffix("."), item.answer) == 1.0


def test_habit_loss_by_hand() -> None:
    # two tokens: at the first a choice of symbol 0 (stop) or 1 (go), at the second symbol 2 for sure
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
    loss = warm_start.habit_loss(logits, torch.tensor([0, 2]), torch.tensor([1, 2]), probability=0.4)
    # -(0.4 ln 0.5 + 0.6 ln 0.25 + ln 0.8) / 2 = (0.277259 + 0.831777 + 0.223144) / 2
    assert loss.item() == pytest.approx(0.666090, abs=1e-6)


def test_balance_loss_is_one_when_even_and_counts_no_pads() -> None:
    model = warm_start.make_model(0)
    assert sum(p.numel() for p in model.parameters()) == 187_424
    tap = warm_start.RouterTap(model)
    even = torch.zeros(8, 8)
    ids = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], [0, 0], [0, 0], [0, 0], [0, 0]])
    tap.outputs = [(even, even, ids)] * 3
    real = torch.tensor([True] * 4 + [False] * 4)
    assert tap.balance_loss(real).item() == pytest.approx(1.0)
    # all to expert 0, with certainty: 8 * 1 * 1
    sure = torch.full((8, 8), -100.0)
    sure[:, 0] = 100.0
    tap.outputs = [(sure, even, torch.zeros(8, 2, dtype=torch.long))] * 3
    assert tap.balance_loss(real).item() == pytest.approx(8.0)
    tap.close()


def test_batches_have_similar_lengths_and_lose_nothing() -> None:
    items = [Item(f"{a}+{b}=", str(a + b)) for a in range(8) for b in range(2)]
    recipe = demos.Recipe(batch=4, early=0.5)
    rows = [row for ids, _, _ in islice(warm_start.batches(iter(items), recipe, window=4), 4) for row in ids.tolist()]
    prompts = sorted(text_of(row[:4]) for row in rows)
    assert prompts == sorted(item.text for item in items)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "quickstart"
    assert tool.main([str(out), *TINY]) == 0
    return out


def test_the_folder_is_complete_and_usable(built: Path) -> None:
    assert {p.name for p in built.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "recipe.json", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert [p.name for p in built.parent.iterdir()] == ["quickstart"]  # nothing temporary is left
    config = json.loads((built / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"], config["vocab_size"]) == (1, 0, 16)
    task = build(TaskSection(train_size=50, eval_size=20), built)
    assert task.stop_token_ids == (1,)
    assert Decoder(built).decode(task.train[0].token_ids) == task.train[0].text


def test_transformers_loads_it_whole(built: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(built, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert (model.config.num_hidden_layers, model.config.num_experts_per_tok, model.config.norm_topk_prob) == (
        3,
        2,
        True,
    )
    tokenizer = AutoTokenizer.from_pretrained(built)
    assert tokenizer("3+4=")["input_ids"] == [5, 12, 6, 14]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (1, 0, 16)


def test_the_same_recipe_is_not_built_again(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (built / "model.safetensors").read_bytes()
    assert tool.main([str(built), *TINY]) == 0
    assert capsys.readouterr().out == f"{built}: up to date\n"
    assert (built / "model.safetensors").read_bytes() == before


def test_another_recipe_replaces_it_and_a_seed_gives_the_same_bytes(built: Path, tmp_path: Path) -> None:
    out = tmp_path / "quickstart"
    assert tool.main([str(out), *TINY, "--seed", "1"]) == 0
    other = (out / "model.safetensors").read_bytes()
    assert other != (built / "model.safetensors").read_bytes()
    assert tool.main([str(out), *TINY]) == 0  # back to seed 0: replaced
    assert (out / "model.safetensors").read_bytes() == (built / "model.safetensors").read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["quickstart"]
    recipe = json.loads((out / "recipe.json").read_text())
    assert (recipe["recipe"]["seed"], recipe["recipe"]["steps"], recipe["task"]["eval_size"]) == (0, 12, 20)


def test_a_foreign_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.safetensors").write_text("precious")
    assert tool.main([str(tmp_path), *TINY]) == 1
    assert "was not made by this tool" in capsys.readouterr().err
    assert (tmp_path / "model.safetensors").read_text() == "precious"


def test_a_bad_setting_and_a_dead_expert_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "quickstart"
    assert tool.main([str(out), "task.evil_size=3"]) == 1
    assert "task.evil_size" in capsys.readouterr().err
    assert tool.main([str(out), *TINY, "--min-expert-share", "0.126"]) == 1  # more than an even share
    assert "an expert gets only" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_training_lowers_the_loss_without_held_out_texts() -> None:
    task = TaskSection(train_size=50, eval_size=20)
    held_out = {item.text for item in build_items(task)[1]}
    seen: list[str] = []

    def watched() -> object:
        for item in demonstrations(task):
            seen.append(item.text)
            yield item

    losses: list[float] = []
    recipe = demos.Recipe(steps=60, batch=16)
    model = warm_start.make_model(0)
    share = warm_start.train(model, watched(), recipe, lambda step, loss: losses.append(loss))  # type: ignore[arg-type]
    assert sum(losses[-8:]) < 0.7 * sum(losses[:8])
    assert 0.0 <= share <= 0.125
    assert len(seen) >= 60 * 16
    assert not held_out & set(seen)


def test_the_default_config_is_the_quickstart() -> None:
    args = tool.parse(["out"])
    assert load_config(args.config).task == TaskSection()
