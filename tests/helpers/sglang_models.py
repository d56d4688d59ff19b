"""Small Mixtures of Experts that SGLang serves on a CPU, each a Hugging Face folder with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast
from warm_start import EOS, PAD, SYMBOLS, make_tokenizer

from tests.helpers.tiny_models import FAMILIES, qwen3_moe

SIZES: dict[str, Any] = {"hidden": 64, "layers": 3, "experts": 8, "top_k": 2, "vocab": len(SYMBOLS)}


def save_untied_moe(folder: Path, seed: int = 0, **fields: Any) -> Path:
    """Write a random float32 qwen3_moe with an output matrix of its own into folder, which it returns.

    3 layers, 8 experts of which 2 are chosen, hidden size 64, head size 16, the quickstart's 16 symbols (a vocabulary
    that SGLang pads to 64 rows); fields are those of tiny_models.qwen3_moe. SGLang does not tie qwen3_moe: of a tied
    checkpoint it leaves the output matrix zero until weights are sent. Nor does it know mlp_only_layers: it makes
    every layer of a qwen3_moe a mixture and drops the weights of dense ones without a word.
    """
    return _save(qwen3_moe(**{**SIZES, **fields}, seed=seed), folder)


def save_dense_first_moe(folder: Path, seed: int = 0, **fields: Any) -> Path:
    """Write a random float32 glm4_moe whose first layer of three is dense into folder, which it returns.

    8 experts of which 2 are chosen, and one that is always used; fields are those of its transformers config.
    SGLang's routes have a row of zeros for the dense layer.
    """
    return _save(FAMILIES["glm4_moe"](**{"vocab_size": len(SYMBOLS), **fields}, seed=seed), folder)


def _save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(), pad_token=SYMBOLS[PAD], eos_token=SYMBOLS[EOS], model_max_length=512
    )
    tokenizer.save_pretrained(folder)
    return folder
