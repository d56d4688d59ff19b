"""Checks of config against model folders, before any process starts."""

import pytest

from asyncrl.config import validate
from asyncrl.errors import ConfigError
from asyncrl.preflight import preflight
from tests.helpers.tiny_models import qwen3_dense, qwen3_moe


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    qwen3_moe(layers=2, experts=8).save_pretrained(folder / "moe")
    qwen3_moe(layers=2, experts=4).save_pretrained(folder / "other")
    qwen3_dense().save_pretrained(folder / "dense")
    return folder


def config(path, **sections):
    return validate({"model": {"path": str(path)}, **sections})


def test_moe_model_passes_and_is_described(models):
    info = preflight(config(models / "moe"))
    assert (info.layers, info.num_experts, info.top_k) == ((0, 1), 8, 2)


def test_missing_model_names_key_value_and_remedy(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path='.*nowhere'.*make quickstart"):
        preflight(config(tmp_path / "nowhere"))


def test_generator_with_another_model_is_refused(models):
    wrong = config(models / "moe", generator={"model": str(models / "other")})
    with pytest.raises(
        ConfigError, match=r"generator\.model=.*other.*num_experts \(4 against 8\).*leave generator\.model"
    ):
        preflight(wrong)


def test_generator_with_the_same_model_passes(models):
    assert preflight(config(models / "moe", generator={"model": str(models / "moe")})).is_moe


def test_r3_on_a_dense_model_is_refused(models):
    wrong = config(models / "dense", algorithm={"routes": "r3", "rdc": {"mode": "off"}})
    with pytest.raises(ConfigError, match=r"algorithm\.routes=r3 .*dense; set algorithm\.routes=native"):
        preflight(wrong)


@pytest.mark.parametrize("mode", ["filter", "observe", "random"])
def test_rdc_on_a_dense_model_is_refused(models, mode):
    with pytest.raises(ConfigError, match=rf"algorithm\.rdc\.mode={mode} .*set algorithm\.rdc\.mode=off"):
        preflight(config(models / "dense", algorithm={"rdc": {"mode": mode}}))


def test_dense_model_without_routing_methods_passes(models):
    assert not preflight(config(models / "dense", algorithm={"rdc": {"mode": "off"}})).is_moe
