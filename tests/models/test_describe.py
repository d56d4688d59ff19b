"""describe() reads from config.json, without torch, what RouteHook finds in the live model (see test_families.py)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.models.describe import describe
from asyncrl.models.routes import discover_routers
from tests.helpers.tiny_models import deepseek_v3, qwen3_dense, qwen3_moe


def write(folder: Path, **fields: object) -> Path:
    (folder / "config.json").write_text(json.dumps({"vocab_size": 9, **fields}))
    return folder


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: qwen3_moe(layers=4, mlp_only_layers=(0, 2)), id="mlp_only"),
        pytest.param(lambda: deepseek_v3(layers=6, first_k_dense=2), id="first_k_dense"),
    ],
)
def test_dense_layers_of_a_moe_model(model: object, tmp_path: Path) -> None:
    built = model()  # type: ignore[operator]
    built.config.save_pretrained(tmp_path)
    assert describe(tmp_path).layers == tuple(router.layer for router in discover_routers(built))
    assert len(describe(tmp_path).layers) in (2, 4)


def test_dense_model_has_no_layers(tmp_path: Path) -> None:
    qwen3_dense().config.save_pretrained(tmp_path)
    info = describe(tmp_path)
    assert (info.layers, info.num_experts, info.top_k, info.is_moe) == ((), 0, 0, False)


# Fields as in the published config.json of each family, cut to what counts.
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": []},
            (tuple(range(6)), 128, 8),
        ),
        ({"num_experts": 60, "num_experts_per_tok": 4, "decoder_sparse_step": 2}, ((1, 3, 5), 60, 4)),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, (tuple(range(6)), 8, 2)),
        (
            {"n_routed_experts": 256, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1},
            ((3, 4, 5), 256, 8),
        ),
        (
            {"moe_num_experts": 64, "moe_k": 6, "moe_layer_start_index": 1, "moe_layer_end_index": 4},
            ((1, 2, 3, 4), 64, 6),
        ),
        (
            {"num_experts": 4, "num_experts_per_tok": 1, "mlp_layer_types": ["dense", "sparse"] * 3},
            ((1, 3, 5), 4, 1),
        ),
        (
            {"num_experts": 16, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1},
            ((1, 3, 5), 16, 2),
        ),
        ({"n_routed_experts": 8, "num_experts_per_tok": 2, "hybrid_override_pattern": "M-E*ME"}, ((2, 5), 8, 2)),
        (
            {
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "layers_block_type": ["moe", "mlp", "moe", "full_attention", "linear_attention", "moe"],
            },
            ((0, 2, 5), 8, 2),
        ),
        ({"num_experts": 4, "top_k_experts": 2, "enable_moe_block": True}, (tuple(range(6)), 4, 2)),
    ],
)
def test_layer_rules(fields: dict[str, object], expected: tuple[object, ...], tmp_path: Path) -> None:
    info = describe(write(tmp_path, num_hidden_layers=6, **fields))
    assert (info.layers, info.num_experts, info.top_k) == expected


def test_text_config_of_a_multimodal_model(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 11}
    assert describe(write(tmp_path, text_config=text)).layers == (0, 1)
    assert describe(tmp_path).vocab_size == 11


def test_fingerprint_follows_architecture_and_tokenizer_only(tmp_path: Path) -> None:
    def fingerprint(tokenizer: str, **fields: object) -> str:
        (tmp_path / "tokenizer.json").write_text(tokenizer)
        return describe(write(tmp_path, num_hidden_layers=2, **fields)).fingerprint

    base = fingerprint("a")
    assert len(base) == 16
    assert fingerprint("a", torch_dtype="bfloat16", transformers_version="5.0", use_cache=False) == base
    assert fingerprint("a", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}) == base
    assert fingerprint("b") != base
    assert fingerprint("a", rope_theta=5.0) != base


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read config.json"),
        ("{", "cannot read config.json"),
        ("[]", "not a JSON object"),
        ("{}", "no vocab_size"),
        ('{"vocab_size": 5, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 5}', "top-k is 5"),
    ],
)
def test_unusable_folders_are_named(text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        describe(tmp_path)
    assert tmp_path.name in str(caught.value)


def test_describe_never_loads_torch(tmp_path: Path) -> None:
    write(tmp_path, num_hidden_layers=1)
    code = (
        "import sys; from asyncrl.models.describe import describe; describe(sys.argv[1]);"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
