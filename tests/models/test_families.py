"""Six families of the matrix of tests/long, one per kind; the list of families; refusals by name."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from asyncrl.config import validate
from asyncrl.errors import ConfigError, RouteError, WeightSyncError
from asyncrl.models import families, routes
from asyncrl.models.describe import describe
from asyncrl.models.families import REFUSED, SERVED
from asyncrl.models.head import output_head
from asyncrl.models.names import layout
from asyncrl.models.routes import RouteHook
from asyncrl.preflight import preflight
from tests.helpers import family_checks
from tests.helpers.moe_families import build_tiny, causal_moe_types, moe_model_types

SIX = {
    "qwen3_moe": "FlatDecoder",  # softmax over all experts
    "mixtral": "CachedDecoder",  # renormalised; other names on disk
    "deepseek_v3": "CachedDecoder",  # sigmoid with a bias on the choice, groups, shared expert, dense first layer
    "gpt_oss": "CachedDecoder",  # top-k on logits, attention sinks, eager attention only
    "glm4_moe": "CachedDecoder",  # sigmoid in one group
    "qwen3_next": "RecomputeDecoder",  # linear attention, dense layer, shared expert with a gate
}
six = pytest.mark.parametrize("family", SIX)


@six
@pytest.mark.parametrize("check", family_checks.LIVE)
def test_live_model(family: str, check: Callable[[str], None]) -> None:
    check(family)


@six
@pytest.mark.parametrize("check", family_checks.FOLDER)
def test_folder(family: str, check: Callable[[str, Path], None], tmp_path: Path) -> None:
    check(family, tmp_path)


@six
def test_learner(family: str, tmp_path: Path, world: Any) -> None:
    family_checks.check_policy(family, tmp_path, world)


@six
def test_engine(family: str) -> None:
    assert family_checks.check_engine(family) == SIX[family]


def test_every_family_of_transformers_is_served_or_refused() -> None:
    assert moe_model_types() == SERVED.keys() | REFUSED.keys()
    assert not SERVED.keys() & REFUSED.keys()
    assert SERVED.keys() <= causal_moe_types()


def test_formulas_are_all_described() -> None:
    kinds = {family.formula({}) for family in SERVED.values()} | {"softmax_selected"}
    assert kinds <= families.FORMULAS.keys()
    assert families.SERVED["cohere2_moe"].formula({"expert_selection_fn": "sigmoid"}) == "sigmoid_selected"
    assert families.SERVED["qwen3_moe"].formula({"norm_topk_prob": True}) == "softmax_selected"
    assert families.SERVED["qwen3_moe"].formula({"norm_topk_prob": None}) == "softmax_all"


ALONE = sorted(t for t in causal_moe_types() & REFUSED.keys() if "text_config" not in CONFIG_MAPPING[t].sub_configs)


@pytest.mark.parametrize("family", ALONE)
def test_refused_by_name_and_for_a_reason_that_holds(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_tiny(family)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"'{family}' {REFUSED[family][:20]}"):
        describe(tmp_path)
    with pytest.raises(RouteError, match=f"'{family}' {REFUSED[family][:20]}"):
        RouteHook(model)
    monkeypatch.setattr(routes, "REFUSED", {})
    with pytest.raises((ConfigError, RouteError, WeightSyncError)):
        _serve(model)


def _serve(model: Any) -> None:
    """What a run does with a model, as far as it takes to see that a refused one cannot be served."""
    ids, hook = family_checks.tokens(), RouteHook(model)
    output_head(model)
    layout(model)
    chosen: list[Any] = []
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.register_forward_pre_hook(lambda _module, args: chosen.append(args[0]))
    routes_LBSK = family_checks.random_routes(hook, 2, 7)
    with hook.replay(routes_LBSK):
        model(ids)
    # The only experts that are rows of an embedding are those of doge.
    if not any(torch.equal(rows.flatten(), routes_LBSK[0].flatten()) for rows in chosen):
        raise RouteError("forced routes do not reach the experts")


def test_refused_before_any_process_starts(tmp_path: Path) -> None:
    fields = {"model_type": "phimoe", "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "vocab_size": 64}))
    with pytest.raises(ConfigError, match=r"model.path=.*'phimoe' draws its experts at random"):
        preflight(validate({"model": {"path": str(tmp_path)}}))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "no_such_moe", "num_experts": 4, "num_hidden_layers": 2}, "'no_such_moe' is a Mixture"),
        ({"model_type": "dbrx", "n_layers": 2, "ffn_config": {"moe_num_experts": 4, "moe_top_k": 1}}, "'dbrx' takes"),
        ({"model_type": "gemma4", "text_config": {"num_experts": 4, "num_hidden_layers": 2}}, "multimodal"),
        ({"model_type": "qwen3_vl_moe", "text_config": {"num_experts": 4, "num_hidden_layers": 2}}, "no causal"),
    ],
)
def test_refusals_from_config_json(fields: dict[str, object], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 64, **fields}))
    with pytest.raises(ConfigError, match=words):
        describe(tmp_path)


def test_the_dense_members_of_a_family_are_dense(tmp_path: Path) -> None:
    for fields in ({"model_type": "gemma4_text", "enable_moe_block": False, "num_experts": 4},
                   {"model_type": "doge", "is_moe": False, "num_experts": 4}):  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 64, "num_hidden_layers": 2, **fields}))
        assert not describe(tmp_path).is_moe


def test_the_table_needs_no_torch() -> None:
    code = "import sys, asyncrl.models.families; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
