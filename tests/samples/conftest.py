"""A run folder with dumps of updates 0 and 2 whose responses have texts, made with a tokenizer of single bytes."""

from dataclasses import replace

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from asyncrl.generator.collect import count_routes
from tests.helpers.dumped_run import settings, train
from tests.helpers.tiny_models import qwen3_moe
from tests.learner.groups import make_groups, make_trajectory

END = 256
"""Id of the stop token; 257 and above have no text."""

TEXTS = {
    0: [
        "The sum is 12.", "\u00e9\u65e5\N{GRINNING FACE}", "two\nlines\ttab",
        "[bold red]x[/] <script>alert(1)</script>",
    ],
    1: [
        "\x1b[2Jreward 1\r\x07", "fake \N{RIGHT-TO-LEFT OVERRIDE}abc \N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}",
        "&amp; \"q\" 'r' </div>", "long " * 30,
    ],
}  # fmt: skip
"""By group. Each is followed by the stop token."""


def bytes_tokenizer():
    """Ids 0 to 255 are bytes, then the stop token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    assert tokenizer.token_to_id("<|end|>") == END
    return tokenizer


def groups_with_texts(info, update, full_routes=True):
    """Two groups of four. The second was sampled under two versions, one of its responses is partly an observation."""
    tokenizer, rng, found = bytes_tokenizer(), np.random.default_rng(update), []
    for g, group in enumerate(make_groups(info, 2, 4, seed=update)):
        ids = np.asarray(tokenizer.encode(f"What is {g} + 1?\n").ids, np.int32)
        prompt = replace(
            group.prompt, token_ids=ids, text="What?", answer=f"gold {g}", data_source=("sums", "other")[g]
        )
        responses = []
        for i, text in enumerate(TEXTS[g]):
            tokens = np.asarray([*tokenizer.encode(text).ids, END], np.int32)
            n = len(tokens)
            versions = ((update, 10**9),) if g == 0 or update == 0 or n < 8 else ((update - 1, 4), (update, 10**9))
            t = make_trajectory(f"0/p{g}#0.{i}", len(ids), n, info, rng, versions, reward=(0.0, 1.0, 0.25, 1.0)[i])
            mask = np.ones(n, bool)
            if (g, i) == (0, 0):
                mask[4:8] = False
                t = replace(t, parts={"format": 0.5, "turns": 2.0})
            counts = t.route_counts
            if not mask.all():
                # As a generator counts: nothing at what the policy did not sample.
                counts = np.stack([count_routes(t.routes, mask, len(ids) - 1, info.num_experts)])
            responses.append(
                replace(
                    t, token_ids=tokens, loss_mask=mask, route_counts=counts,
                    finish_reason="length" if (g, i) == (1, 3) else "stop",
                )
            )  # fmt: skip
        found.append(replace(group, prompt=prompt, trajectories=tuple(responses)))
    return found


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples") / "start"
    qwen3_moe(hidden=32, layers=2, experts=8, top_k=2, vocab=260, seed=3).save_pretrained(folder)
    bytes_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def run(start, world, tmp_path_factory):
    config = settings(tmp_path_factory.mktemp("runs") / "run", start)
    train(config, world, 3, make=groups_with_texts)
    return config.run_dir
