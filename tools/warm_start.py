"""The warm-started quickstart policy: tokenizer, tiny Qwen3-MoE, training, evaluation.

It is taught good arithmetic and the bad habit of stopping early: a habit is what an outcome reward can unlearn in
minutes, arithmetic is not. asyncrl itself never imports this file.

Axes: B sequences of a batch, S tokens, N response tokens of a batch, L layers, E experts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from demonstrations import EOS, ID, IGNORE, PAD, SYMBOLS, Recipe, demonstrate
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from asyncrl.tasks.base import Item
from asyncrl.tasks.rewards import score

NUM_EXPERTS = 8


class Answers(NamedTuple):
    """Evaluation of held-out items: mean reward, mean reward by number of terms, mean length."""

    accuracy: float
    by_terms: dict[int, float]
    length: float


def make_tokenizer() -> Tokenizer:
    """One id per character; an unknown character is an error."""
    tokenizer = Tokenizer(models.WordLevel(ID))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(SYMBOLS[i], special=True) for i in (PAD, EOS)])
    return tokenizer


def make_model(seed: int) -> Qwen3MoeForCausalLM:
    """Random model of 187,424 parameters."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=64,
        intermediate_size=128,  # of dense layers; there are none
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=128,
        # Sequences have some 30 tokens: with the usual 10,000 most rotary channels hardly turn.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        # The usual 0.02 is for wide layers; 1/sqrt(64) would keep the variance.
        initializer_range=0.08,
        router_aux_loss_coef=0.01,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    return Qwen3MoeForCausalLM(config)


def save(model: Qwen3MoeForCausalLM, folder: Path) -> None:
    """Write model and tokenizer as Hugging Face files."""
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=32, pad_token_id=PAD, eos_token_id=EOS
    )
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(), pad_token=SYMBOLS[PAD], eos_token=SYMBOLS[EOS], model_max_length=128
    ).save_pretrained(folder)


def batches(items: Iterator[Item], recipe: Recipe, window: int = 8) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Endless (ids, stop, go), each int64 [B, S], of similar lengths: windows are sorted, then cut."""
    rng = random.Random(recipe.seed)
    while True:
        drawn = [demonstrate(next(items), rng, recipe.early) for _ in range(window * recipe.batch)]
        drawn.sort(key=lambda d: len(d.ids))
        cut = [drawn[i : i + recipe.batch] for i in range(0, len(drawn), recipe.batch)]
        rng.shuffle(cut)
        for batch in cut:
            yield (
                _pad([d.ids for d in batch], PAD),
                _pad([d.stop for d in batch], IGNORE),
                _pad([d.go for d in batch], IGNORE),
            )


def _pad(rows: Sequence[list[int]], value: int) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


class RouterTap:
    """Keeps the router outputs of the last forward: (logits [B*S, E], weights, expert ids [B*S, K]) per layer."""

    def __init__(self, model: Qwen3MoeForCausalLM) -> None:
        self.outputs: list[tuple[Tensor, Tensor, Tensor]] = []
        self._handles = [
            layer.mlp.gate.register_forward_hook(lambda module, args, output: self.outputs.append(output))
            for layer in model.model.layers
        ]

    def shares_LE(self, real: Tensor) -> list[Tensor]:
        """Share of the tokens' choices that each expert got, per layer; `real` bool [B*S] leaves out pads."""
        return [F.one_hot(ids[real], NUM_EXPERTS).sum((0, 1)) / ids[real].numel() for _, _, ids in self.outputs]

    def balance_loss(self, real: Tensor) -> Tensor:
        """Switch load-balancing loss, E * sum_e share_e * mean probability_e, averaged over layers; 1 is even.

        Per layer, unlike the one in transformers, which lets an expert of one layer make up for its
        namesake in another.
        """
        terms = [
            NUM_EXPERTS * (share * logits[real].softmax(-1).mean(0)).sum()
            for share, (logits, _, _) in zip(self.shares_LE(real), self.outputs, strict=True)
        ]
        return torch.stack(terms).mean()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def habit_loss(logits_NV: Tensor, stop_N: Tensor, go_N: Tensor, probability: float) -> Tensor:
    """Mean cross-entropy; where a term remains the target is `stop` and `go` with the habit's odds.

    Same expected gradient as sampling where to stop, without the noise of the coin.
    """
    logp_NV = logits_NV.log_softmax(-1)
    stop = logp_NV.gather(1, stop_N[:, None]).mean()
    go = logp_NV.gather(1, go_N[:, None]).mean()
    return -(probability * stop + (1 - probability) * go)


def train(
    model: Qwen3MoeForCausalLM,
    items: Iterator[Item],
    recipe: Recipe,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> float:
    """Train in place. Returns the lowest share of choices of any expert over the last 100 steps."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=recipe.weight_decay, fused=True
    )
    stream = batches(items, recipe)
    tap = RouterTap(model)
    usage_LE = torch.zeros(model.config.num_hidden_layers, NUM_EXPERTS)
    model.train()
    for step in range(recipe.steps):
        rate = min(1.0, (step + 1) / recipe.warmup) * (1.0 - 0.9 * step / recipe.steps)
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * rate
        ids_BS, stop_BS, go_BS = next(stream)
        tap.outputs.clear()
        hidden = model.model(ids_BS, use_cache=False).last_hidden_state
        keep = stop_BS[:, 1:] != IGNORE
        logits_NV = model.lm_head(hidden[:, :-1][keep])
        loss = habit_loss(logits_NV, stop_BS[:, 1:][keep], go_BS[:, 1:][keep], recipe.stop)
        real = (ids_BS != PAD).flatten()
        (loss + recipe.aux_loss * tap.balance_loss(real)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if recipe.steps - step <= 100:
            usage_LE += torch.stack(tap.shares_LE(real))
        progress(step + 1, loss.item())
    tap.close()
    return float((usage_LE / usage_LE.sum(-1, keepdim=True)).min())


@torch.no_grad()
def evaluate(
    model: Qwen3MoeForCausalLM, items: Sequence[Item], greedy: bool, max_new_tokens: int, seed: int = 0
) -> Answers:
    """Answer every item once, at temperature 1 or greedily, and score it as in training."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    rewards: dict[int, list[float]] = {}
    lengths: list[int] = []
    for width in sorted({len(item.text) for item in items}):
        same = [item for item in items if len(item.text) == width]  # one width: no padding
        prompts = torch.tensor([[ID[c] for c in item.text] for item in same])
        for item, row in zip(same, _respond(model, prompts, greedy, max_new_tokens, generator), strict=True):
            text = "".join(SYMBOLS[i] for i in row if i not in (PAD, EOS))
            terms = len(re.findall(r"\d+", item.text))
            rewards.setdefault(terms, []).append(score("chain_sum", text, item.answer))
            lengths.append(row.index(EOS) + 1 if EOS in row else len(row))
    count = len(items)
    return Answers(
        sum(sum(values) for values in rewards.values()) / count,
        {terms: sum(values) / len(values) for terms, values in sorted(rewards.items())},
        sum(lengths) / count,
    )


def _respond(
    model: Qwen3MoeForCausalLM, prompts_BS: Tensor, greedy: bool, max_new_tokens: int, generator: torch.Generator
) -> list[list[int]]:
    """Response ids of prompts of one length; PAD after EOS."""
    cache, inputs = None, prompts_BS
    columns: list[Tensor] = []
    done_B = torch.zeros(len(prompts_BS), dtype=torch.bool)
    while len(columns) < max_new_tokens and not bool(done_B.all()):
        output = model(inputs, cache=cache, use_cache=True, logits_to_keep=1)
        cache, logits_BV = output.cache, output.logits[:, -1]
        token_B = (
            logits_BV.argmax(-1) if greedy else torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)[:, 0]
        )
        token_B = token_B.masked_fill(done_B, PAD)
        done_B |= token_B == EOS
        columns.append(token_B)
        inputs = token_B[:, None]
    return torch.stack(columns, 1).tolist()
