"""The memory estimate as arithmetic: parameter counts, growth, what fits."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from asyncrl.cli import app
from asyncrl.config import validate
from asyncrl.errors import ConfigError
from asyncrl.learner.footprint import largest_tokens, plan_of, report
from asyncrl.models.logprobs import BLOCK_NUMBERS
from asyncrl.models.memory import GIB, Plan, estimate, kept_per_token, read_shape
from tests.helpers import tiny_models

QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@pytest.fixture
def qwen(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    return tmp_path


def config(path, checkpointing, ranks=8):
    return validate(
        {
            "model": {"path": str(path), "dtype": "bfloat16"},
            "sampling": {"max_new_tokens": 20000 - 64},
            "algorithm": {"groups_per_update": 64, "group_size": 8},
            "learner": {"ranks": ranks, "device": "cuda", "activation_checkpointing": checkpointing},
        }
    )


def test_qwen3_30b_has_its_30_5_billion_parameters(qwen):
    shape = read_shape(qwen)
    # 2 x 151936 x 2048 + 2048 around 48 layers of 128 x 3 x 2048 x 768 + 128 x 2048 + attention and norms.
    assert shape.parameters == 30_532_122_624
    assert shape.layer_parameters == 623_120_640 and shape.root_parameters == 622_331_904


def test_qwen3_30b_at_20k_tokens_on_8_gpus_needs_checkpointing(qwen):
    said = "\n".join(report(config(qwen, False), 64, 80))
    assert "does not fit in 80 GiB" in said and "with learner.activation_checkpointing=true 2" in said
    lines = report(config(qwen, True), 64, 80)
    (fits,) = [line for line in lines if line.startswith("fits in 80 GiB")]
    peak = float(fits.split(": ")[1].split()[0])
    # Masters, moments and gradients are 4 x 4 bytes of an eighth of the parameters: 56.9 GiB.
    assert 56.9 < peak < 76
    assert int(fits.split()[-2]) >= 20000
    assert "does not fit in 40 GiB" in "\n".join(report(config(qwen, True), 64, 40))


def test_the_remedy_names_ranks_that_do_fit(qwen):
    said = "\n".join(report(config(qwen, True, ranks=4), 64, 80))
    assert "learner.ranks=8" in said
    shape, plan = read_shape(qwen), plan_of(config(qwen, True), 64)
    most = largest_tokens(shape, plan, 76 * GIB)
    assert estimate(shape, replace(plan, tokens=most)).total <= 76 * GIB
    assert estimate(shape, replace(plan, tokens=most + 1)).total > 76 * GIB


def test_routes_and_rows_that_are_too_long_are_told(qwen):
    said = "\n".join(report(config(qwen, True, ranks=1024), 64, 2))
    assert "on any number of ranks: lower sampling.max_new_tokens" in said


def test_the_count_by_sizes_is_that_of_the_files(tmp_path):
    for name in ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "qwen2_moe"):
        model = tiny_models.FAMILIES[name]()
        folder = tiny_models.save(model, tmp_path / name)
        counted = read_shape(folder)
        assert counted.parameters == sum(t.numel() for t in model.state_dict().values()), name
        for file in folder.glob("*.safetensors"):
            file.unlink()
        by_sizes = read_shape(folder).parameters
        # Biases and small vectors are not counted.
        assert by_sizes == pytest.approx(counted.parameters, rel=0.02), name


def test_tied_embeddings_count_once(tmp_path):
    model = tiny_models.qwen3_moe(tie_word_embeddings=True)
    assert read_shape(tiny_models.save(model, tmp_path)).parameters == sum(p.numel() for p in model.parameters())


def test_a_config_without_sizes_is_refused_by_field(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 8, "num_hidden_layers": 1}))
    with pytest.raises(ConfigError, match="no hidden_size"):
        read_shape(tmp_path)


def plan(**changes):
    fields = {"dtype": "float32", "ranks": 1, "tokens": 1000, "length": 500, "share": 1000, "checkpointing": False}
    return Plan(**{**fields, "logprob_chunk": 64, **changes})


def test_what_a_layer_keeps_by_hand(qwen):
    # bf16, H = 2048, Q = 4096, KV = 512, E = 128, K = 8, I = 768:
    # norms 2 x 8 H + q, k (8 + 2 for v, out) + log-sum-exp 4 x 32 + 4 E + K (2 (2 H + 4 I) + 38)
    by_hand = 2 * 8 * 2048 + 8 * (4096 + 512) + 2 * 512 + 2 * 4096 + 4 * 32 + 4 * 128
    by_hand += 8 * (2 * (2 * 2048 + 4 * 768) + 38)
    assert kept_per_token(read_shape(qwen), plan(dtype="bfloat16"), True) == by_hand


def test_ranks_divide_what_is_sharded_and_nothing_else(qwen):
    shape = read_shape(qwen)
    one, eight = (estimate(shape, plan(dtype="bfloat16", ranks=n)) for n in (1, 8))
    names = [dict(e.always) for e in (one, eight)]
    assert names[0]["parameters"] == 4 * shape.parameters
    assert names[1]["parameters"] * 8 == pytest.approx(names[0]["parameters"])
    assert names[1]["AdamW moments"] == 2 * names[1]["parameters"]
    assert names[1]["batch and routes"] == names[0]["batch and routes"]


def test_the_estimate_knows_the_blocks_of_the_logprobs():
    assert plan().block_numbers == BLOCK_NUMBERS


def test_a_reference_policy_is_in_the_table_where_there_is_one(qwen):
    plain = config(qwen, True)
    kl = plain.algorithm.kl.model_copy(update={"coef": 0.01})
    with_kl = plain.model_copy(update={"algorithm": plain.algorithm.model_copy(update={"kl": kl})})
    one, two = (report(c, 64, 80) for c in (plain, with_kl))
    (line,) = [line for line in two if "reference policy" in line]
    # 4 bytes of an eighth of 30.5 billion.
    assert line.split()[-2:] == ["14.2", "GiB"] and not any("reference" in line for line in one)
    peaks = [float(line.split()[-2]) for lines in (one, two) for line in lines if line.startswith("  peak")]
    assert peaks[1] - peaks[0] == pytest.approx(14.2, abs=0.1)
    with pytest.raises(ConfigError, match=r"nowhere"):
        lost = kl.model_copy(update={"reference": "/nowhere"})
        report(plain.model_copy(update={"algorithm": plain.algorithm.model_copy(update={"kl": lost})}), 64, 80)


def test_asyncrl_config_says_what_fits(qwen):
    done = CliRunner().invoke(app, ["config", "--model", str(qwen), "--device-memory", "640"])
    assert done.exit_code == 0, done.output
    assert "memory of one of 1 learner ranks" in done.output and "30.53 B parameters" in done.output
    assert "fits in 640 GiB" in done.output and "memory of one generator" in done.output


@pytest.mark.parametrize(
    ("algorithm", "per_take", "experts", "size"),
    [
        ({"routes": "r2"}, 4, 128, 1),
        ({"routes": "r2"}, 4, 512, 2),
        ({"correction": {"kind": "rspo"}}, 4, 128, 1 + 4),
        ({"routes": "r2", "correction": {"kind": "rspo"}}, 2, 128, 1 + 4),
        ({"routes": "r3"}, 4, 128, None),
        ({}, 4, 128, None),
    ],
)
def test_the_routes_that_a_take_keeps_are_in_the_host_estimate(tmp_path, algorithm, per_take, experts, size):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B | {"num_experts": experts}))
    tree = config(tmp_path, True).model_dump(exclude_unset=True)
    tree["algorithm"] |= algorithm
    found = report(validate(tree | {"staleness": {"updates_per_take": per_take, "max_lag": 8}}), 64, 80)
    lines = [line.split() for line in found if "its routes under pi_old" in line]
    if size is None:
        assert lines == []
        return
    # 8 ranks share 64 groups of 8 responses of 20000 tokens; 48 layers, 8 experts per token.
    expected = 64 // 8 * 8 * 20000 * 48 * 8 * size * per_take
    (words,) = lines
    assert words[-1] == "GiB" and float(words[-2]) == pytest.approx(expected / GIB, abs=0.05)
