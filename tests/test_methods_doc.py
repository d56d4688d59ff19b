"""docs/methods.md against the code: every method, file, knob and default, its numbers, and what goes together."""

import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from asyncrl.algos.advantages import group_advantages
from asyncrl.algos.aggregate import aggregate
from asyncrl.algos.kl import kl_loss
from asyncrl.algos.registry import ADVANTAGES, AGGREGATIONS, CORRECTIONS, SURROGATES
from asyncrl.algos.seam import call
from asyncrl.config import load_config
from asyncrl.errors import ConfigError
from asyncrl.rules_algorithm import notes
from asyncrl.sections.algorithm import AlgorithmSection, CorrectionSection, KlSection

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/methods.md").read_text()
FILES = sorted((ROOT / "configs/methods").glob("*.yaml"))
DOUBLE = torch.float64


def tables():
    """Every table of the page as rows of cells, by its header."""
    out = {}
    for block in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in block.splitlines()]
        assert all(len(row) == len(rows[0]) for row in rows[2:]), rows[0]
        out.setdefault(tuple(rows[0]), []).extend(rows[2:])
    return out


TABLES = tables()
FITTING = TABLES["settings", "verdict", "why"]


def code(cell):
    found = re.fullmatch(r"`([^`]+)`", cell)
    assert found, cell
    return found[1]


def numbers(cell):
    return [float(value) for value in re.split(r"[,;] ", cell)]


def value_of(cell):
    """A default as the page writes it."""
    if cell == "null":
        return None
    try:
        return float(cell)
    except ValueError:
        return cell


def at(tree, key):
    for part in key.split("."):
        tree = tree[part]
    return tree


def test_every_file_is_in_the_overview_and_sets_what_its_switch_says():
    rows = TABLES["file", "switch", "in a line"]
    assert sorted(code(file) for file, *_ in rows) == [f.name for f in FILES]
    for file, switch, _ in rows:
        tree = OmegaConf.to_container(OmegaConf.load(ROOT / "configs/methods" / code(file)))
        for setting in code(switch).split():
            key, _, value = setting.partition("=")
            assert str(at(tree, key)) == value, f"{file}: {setting}"


def test_every_method_has_its_place():
    headings = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
    assert headings == [*SURROGATES, *CORRECTIONS]
    for head, registry in (
        (("advantage", "formula", "source", "by example: rewards 1 0 0 0 and 1 1 0 0"), ADVANTAGES),
        (("aggregation", "formula", "by example: 10 tokens of loss 1 and 2 tokens of loss 4, 16 tokens allowed"),
         AGGREGATIONS),
    ):  # fmt: skip
        assert [code(row[0]) for row in TABLES[head]] == list(registry)
    routes = AlgorithmSection.model_fields["routes"].annotation.__args__
    head = ("routes", "forced in the scoring pass of the take", "forced in the updates", "costs")
    assert [code(row[0]) for row in TABLES[head]] == list(routes)


@pytest.mark.parametrize(
    ("head", "registry", "section"),
    [("surrogate", SURROGATES, AlgorithmSection), ("correction", CORRECTIONS, CorrectionSection)],
)
def test_every_knob_stands_there_with_its_default(head, registry, section):
    said = {(code(method), code(knob)): value_of(value) for method, knob, value in TABLES[head, "knob", "default"]}
    true = {
        (name, knob): method.defaults.get(knob, section.model_fields[knob].default)
        for name, method in registry.items()
        for knob in method.knobs
    }
    assert said == true
    assert list(said) == list(true)


def test_the_knobs_of_kl_and_of_routes():
    said = {code(knob): value_of(value) for knob, value in TABLES["knob", "default"]}
    assert said == {name: field.default for name, field in KlSection.model_fields.items()}
    assert "`algorithm.native_drift_every` (default 1)" in PAGE
    assert AlgorithmSection.model_fields["native_drift_every"].default == 1


def test_the_gradients_of_the_surrogates():
    head = ("surrogate", "gradient, A = 1", "clipped, A = 1", "gradient, A = -1", "clipped, A = -1")
    rows = TABLES[head]
    assert [code(row[0]) for row in rows] == list(SURROGATES)
    for name, *cells in rows:
        for advantage, (gradient, clipped) in zip((1.0, -1.0), (cells[:2], cells[2:]), strict=True):
            logp = torch.full((1, 3), -2.0, dtype=DOUBLE, requires_grad=True)
            inputs = {
                "logp": logp, "old_logp": logp.detach() - torch.tensor([[0.5, 1, 3]], dtype=DOUBLE).log(),
                "advantages": torch.tensor([advantage]), "mask": torch.ones(1, 3),
            }  # fmt: skip
            result = call(SURROGATES[code(name)], inputs, AlgorithmSection())
            result.loss.sum().backward()
            assert numbers(gradient) == pytest.approx(logp.grad[0].tolist(), abs=5e-5), name
            assert clipped == ", ".join("yes" if c else "no" for c in result.clipped[0]), name


def test_the_weights_of_the_corrections():
    rows = {code(name): numbers(weights) for name, weights in TABLES["correction", "weights"]}
    assert list(rows) == [*list(CORRECTIONS)[:2], "tis level=sequence", *list(CORRECTIONS)[2:]]
    old = torch.full((1, 3), -2.0, dtype=DOUBLE)
    inputs = {
        "logp": old, "rollout_logp": old - torch.tensor([[0.25, 1, 3]], dtype=DOUBLE).log(), "mask": torch.ones(1, 3),
        "router_shift": torch.tensor([[0, 0.1, 0.5]], dtype=DOUBLE),
    }  # fmt: skip
    for name, said in rows.items():
        kind, _, level = name.partition(" level=")
        found = call(CORRECTIONS[kind], inputs, CorrectionSection(level=level or "token"))
        assert said == pytest.approx(found[0].tolist(), abs=5e-5), name


def test_the_numbers_of_advantages_aggregations_and_kl():
    for name, _, _, said in TABLES["advantage", "formula", "source", "by example: rewards 1 0 0 0 and 1 1 0 0"]:
        found = group_advantages([1.0, 0, 0, 0, 1, 1, 0, 0], [0] * 4 + [1] * 4, code(name))
        assert numbers(said) == pytest.approx(found.tolist(), abs=5e-5), name
    loss, mask = torch.ones(2, 10), torch.ones(2, 10)
    loss[1], mask[1, 2:] = 4.0, 0.0
    head = ("aggregation", "formula", "by example: 10 tokens of loss 1 and 2 tokens of loss 4, 16 tokens allowed")
    for name, _, said in TABLES[head]:
        assert float(said) == pytest.approx(float(aggregate(loss, mask, code(name), 12, 2, 2 * 16)), abs=5e-5), name
    head = ("`kl.estimator`", "term", "gradient by log pi", "by example: pi = 0.5, ref = mu = 0.25")
    kinds = KlSection.model_fields["estimator"].annotation.__args__
    assert [code(row[0]) for row in TABLES[head]] == list(kinds)
    for name, _, _, said in TABLES[head]:
        kind = code(name)
        logp, ref = torch.tensor([[0.5]], dtype=DOUBLE).log().requires_grad_(), torch.tensor([[0.25]]).double().log()
        value = kl_loss(logp, ref, None, kind, ref if kind == "unbiased" else None)
        value.sum().backward()
        wanted = re.fullmatch(r"value ([\d.]+), gradient ([\d.]+)", said)
        assert wanted is not None
        assert float(wanted[1]) == pytest.approx(float(value.detach()), abs=5e-5), kind
        assert float(wanted[2]) == pytest.approx(float(logp.grad), abs=5e-5), kind


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run config that sets nothing but what it must."""
    file = tmp_path_factory.mktemp("config") / "plain.yaml"
    file.write_text("model: {path: x}\n")
    return file


@pytest.mark.parametrize("row", FITTING, ids=lambda row: row[0].replace("`", ""))
def test_what_goes_together_does_and_the_rest_is_refused_or_warned_of(plain, row):
    settings, verdict, why = row
    overrides = code(settings).split()
    if verdict == "refused":
        assert why
        with pytest.raises(ConfigError) as caught:
            load_config(plain, overrides)
        keys = [s.partition("=")[0] for s in overrides]
        assert any(key.rpartition(".")[2] in str(caught.value) for key in keys)
        return
    found = list(notes(load_config(plain, overrides)))
    assert (verdict, bool(found)) in (("runs", False), ("warned", True)), found


def test_the_table_speaks_of_every_rule():
    """Each needs_ratio, needs_take and weighs_mu method has a refused row of its own."""
    refused = {code(settings) for settings, verdict, _ in FITTING if verdict == "refused"}
    for name, method in SURROGATES.items():
        alone = f"algorithm.surrogate={name}" + (
            f" algorithm.aggregation={method.aggregation}" if method.aggregation else ""
        )
        assert (alone in refused) == method.needs_ratio, name
    for name, correction in CORRECTIONS.items():
        default = name == CorrectionSection.model_fields["kind"].default
        twice = "algorithm.ratio=behaviour" + ("" if default else f" algorithm.correction.kind={name}")
        assert (twice in refused) == correction.weighs_mu, name
        assert (f"algorithm.correction.kind={name}" in refused) == correction.needs_take, name


def test_every_file_runs_on_the_quickstart_with_nothing_to_say(tmp_path):
    for file in FILES:
        config = load_config([ROOT / "configs/quickstart.yaml", file])
        assert list(notes(config)) == [], file.name


def test_every_curve_that_there_is_is_shown():
    """docs/images/methods has one per file; a page that leaves one out has grown old."""
    drawn = {f.stem for f in (ROOT / "docs/images/methods").glob("*.svg")} & {f.stem for f in FILES}
    shown = set(re.findall(r"\]\(images/methods/(\w+)\.svg\)", PAGE))
    assert drawn <= shown
