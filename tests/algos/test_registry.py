"""The registry and the files it names: what a line promises, the file keeps, and a config can name."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from asyncrl.algos.registry import ADVANTAGES, AGGREGATIONS, CORRECTIONS, SURROGATES, Method
from asyncrl.algos.seam import INPUTS, function, knobs_of, named
from asyncrl.config import load_config, validate
from asyncrl.errors import ConfigError
from asyncrl.sections.algorithm import AlgorithmSection, CorrectionSection

ROOT = Path(__file__).parents[2]
ALGOS = ROOT / "asyncrl/algos"
QUICKSTART = ROOT / "configs/quickstart.yaml"

# Folder of the methods, to the table, the section with their knobs, and the key that chooses one.
KINDS = {
    "surrogates": (SURROGATES, AlgorithmSection, "algorithm.surrogate"),
    "corrections": (CORRECTIONS, CorrectionSection, "algorithm.correction.kind"),
    "advantages": (ADVANTAGES, AlgorithmSection, "algorithm.advantage"),
    "aggregate": (AGGREGATIONS, AlgorithmSection, "algorithm.aggregation"),
}
METHODS = [
    pytest.param(folder, method, id=f"{folder}-{name}")
    for folder, (table, *_) in KINDS.items()
    for name, method in table.items()
]
SHARED = {"advantages": {"groups"}, "aggregate": {"divide"}}
"""Files of a folder that are no methods, and that all methods there may import."""
HELPERS = {"asyncrl.algos.ratio", "asyncrl.algos.tokens"}
"""Modules that a method may import besides."""


def file_of(method: Method) -> Path:
    return ALGOS / (method.place.partition(":")[0].replace(".", "/") + ".py")


@pytest.mark.parametrize("module", ["asyncrl.algos.registry", "asyncrl.config"])
def test_a_config_is_checked_without_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("folder", "method"), METHODS)
def test_a_line_names_a_function_of_a_file_of_its_folder(folder, method):
    assert method.place.startswith(f"{folder}.")
    assert Path(inspect.getfile(inspect.unwrap(function(method.place)))) == file_of(method)


@pytest.mark.parametrize(("folder", "method"), METHODS)
def test_the_parameters_are_inputs_of_the_kind_and_the_knobs(folder, method):
    assert set(named(method.place)) - set(method.knobs) <= set(INPUTS[folder])
    assert set(method.knobs) <= set(named(method.place)), "a knob that the function does not take"
    assert not set(method.knobs) & set(INPUTS[folder]), "a knob may not have the name of an input"
    parameters = inspect.signature(function(method.place)).parameters.values()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    # An input is always given; only a mask may be left out by who calls the function itself.
    loose = {p.name: p.default for p in parameters if p.default is not p.empty and p.name not in method.knobs}
    assert loose in ({}, {"mask": None})


@pytest.mark.parametrize(("folder", "method"), METHODS)
def test_knobs_are_keys_of_the_section_with_the_same_defaults(folder, method):
    section: type[BaseModel] = KINDS[folder][1]
    assert set(method.knobs) <= set(section.model_fields)
    assert set(method.defaults) <= {k for k in method.knobs if section.model_fields[k].default is None}
    in_force = knobs_of(method, section())
    parameters = inspect.signature(function(method.place)).parameters
    for name, value in in_force.items():
        assert parameters[name].default in (parameters[name].empty, value), name


def test_a_surrogate_names_an_aggregation_that_there_is():
    assert {s.aggregation for s in SURROGATES.values()} <= {"", *AGGREGATIONS}


@pytest.mark.parametrize(("folder", "method"), METHODS)
def test_no_method_knows_another_nor_who_calls_it(folder, method):
    allowed = HELPERS | {f"asyncrl.algos.{folder}.{name}" for name in SHARED.get(folder, ())}
    for node in ast.walk(ast.parse(file_of(method).read_text())):
        if isinstance(node, ast.Import):
            assert {alias.name.partition(".")[0] for alias in node.names} <= {"math", "torch"}
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("asyncrl"):
            assert node.module in allowed


@pytest.mark.parametrize(("folder", "method"), METHODS)
def test_a_method_is_one_short_file_that_says_where_it_is_from(folder, method):
    source = file_of(method).read_text()
    assert len(source.splitlines()) <= 80
    words = " ".join(f"{ast.get_docstring(ast.parse(source))} {function(method.place).__doc__}".split())
    if method is not CORRECTIONS["none"]:
        assert re.search(r'arXiv \d{4}\.\d{5}|"[A-Z][^"]{20,}", \d{4}', words), "the paper, or title and year"
    returns = inspect.signature(function(method.place)).return_annotation
    assert returns == ("TokenLoss" if folder == "surrogates" else "torch.Tensor")


@pytest.mark.parametrize("folder", KINDS)
def test_every_file_is_in_the_registry_or_shared(folder):
    files = {p.stem for p in (ALGOS / folder).glob("*.py")} - {"__init__"}
    places = [m.place for m in KINDS[folder][0].values()]
    assert len(set(places)) == len(places)
    assert files == {file_of(m).stem for m in KINDS[folder][0].values()} | SHARED.get(folder, set())


@pytest.mark.parametrize("folder", KINDS)
def test_a_config_may_name_what_the_registry_has(folder):
    table, section, key = KINDS[folder]
    leaf = key.rpartition(".")[2]
    assert section.model_json_schema()["properties"][leaf]["enum"] == list(table)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("algorithm.surrogate=gsop", "gspo"),
        ("algorithm.correction.kind=Mask", "mask"),
        ("algorithm.advantage=drgrpo", "dr_grpo"),
        ("algorithm.aggregation=token-mean", "token_mean"),
    ],
)
def test_an_unknown_name_is_refused_with_the_choices(word, meant):
    key, _, value = word.partition("=")
    table = next(table for table, _, k in KINDS.values() if k == key)
    with pytest.raises(ConfigError) as refused:
        load_config(QUICKSTART, [word])
    said = str(refused.value)
    assert said.startswith(f"{key}={value!r}: ") and said.endswith(f"; did you mean {meant!r}?")
    assert all(f"'{name}'" in said for name in table)


def test_an_unknown_name_that_is_near_to_none_is_refused_without_a_guess():
    with pytest.raises(ConfigError) as refused:
        validate({"model": {"path": "m"}, "algorithm": {"correction": {"kind": 3}}})
    assert "algorithm.correction.kind=3: " in str(refused.value) and "did you mean" not in str(refused.value)


def test_off_is_a_word_for_no_correction():
    assert load_config(QUICKSTART, ["algorithm.correction.kind=off"]).algorithm.correction.kind == "none"
