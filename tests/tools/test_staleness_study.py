"""The staleness study: plan, resume, tables, probe arithmetic, faults, and one tiny probe on a real model."""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
from pathlib import Path

import numpy as np
import pytest
import staleness_study
import torch
from study import runs
from study.emulate import Lab, Sampling, restore, save, study_config
from study.faults import Kind, changed, fake_fp8_activation, fake_int4, make_engine
from study.generator import OneIn, is_faulty
from study.plan import Cell, PlanError, Size, arguments, cell_of, cells
from study.probe import Sums, auc, batch_gradient, cosine, keeps, oracle_keep, response_gradients, scored_table
from study.probing import CELLS, PROMPTS, how_sampled
from study.report import BEGIN, END, html_page, replaced, tables_text
from study.results import result_of
from study.tables import estimate, grouped, markdown, outcome_table, p_value, paired, probe_table, tally_table

from asyncrl.cli import read
from asyncrl.types import SamplingParams, Version
from tests.helpers.char_model import save_char_model

PLAIN = Cell("tis", "async16", "healthy", "fp32", 3)


# --- the plan -------------------------------------------------------------------------------------


def test_the_plan_goes_seed_by_seed() -> None:
    found = cells(["tis", "grpo"], ["async16", "on_policy"], ["healthy"], ["fp32"], [1, 2])
    assert len(found) == 8
    assert [c.seed for c in found] == [1] * 4 + [2] * 4
    assert found[1] == Cell("grpo", "async16", "healthy", "fp32", 1)
    assert found[0].name == "tis--async16--healthy--fp32--s1"
    assert cell_of(found[0].name) == found[0]
    assert cell_of("probe") is None and cell_of("tis--nowhere--healthy--fp32--s1") is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"methods": ["ppo"]}, "unknown method 'ppo'; one of grpo, r3"),
        ({"regimes": ["async32"]}, "unknown regime"),
        ({"precisions": ["fp4"]}, "unknown precision"),
        ({"fleets": ["mixed_lags"]}, "for the gradient probe"),
        ({"methods": ["tis", "tis"]}, "every method once"),
        ({"seeds": []}, "every seed once, and at least one: none given"),
        ({"seeds": [-1]}, "from 0 on"),
        ({"methods": ["truth_tis"]}, "a healthy fleet has none"),
    ],
)
def test_a_selection_that_cannot_be_is_refused(change: dict, words: str) -> None:
    given = {"methods": ["tis"], "regimes": ["async16"], "fleets": ["healthy"], "precisions": ["fp32"], "seeds": [1]}
    with pytest.raises(PlanError, match=words):
        cells(**(given | change))


def test_the_command_line_refuses_it_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert staleness_study.main(["train", "--methods", "ppo", "--dir", str(tmp_path)]) == 2
    assert "unknown method 'ppo'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        staleness_study.main(["train", "--seeds", "one"])


def test_every_method_and_regime_is_a_config_that_asyncrl_accepts() -> None:
    from study.plan import METHODS, REGIMES

    for method, regime in [*((m, "async16x4") for m in METHODS), *(("tis", r) for r in REGIMES)]:
        config = read(arguments(Cell(method, regime, "healthy", "fp32", 1), Size(), "runs"))
        assert config.learner.updates % config.staleness.updates_per_take == 0
        assert config.eval.every % config.staleness.sync_every == 0


def test_what_the_methods_set() -> None:
    def of(method: str, fleet: str = "healthy"):
        return read(arguments(Cell(method, "async16", fleet, "fp32", 5), Size(q=0.2, lr=1e-3), "runs"))

    assert of("log_ratio_tis").algorithm.rdc.signal == "log_ratio"
    assert of("log_ratio_tis").algorithm.rdc.q == 0.2
    assert of("rdc_outlier_tis").algorithm.rdc.gate == "outlier"
    assert of("behaviour_rdc").algorithm.rdc.mode == "filter"
    assert of("behaviour_rdc").algorithm.ratio == "behaviour"
    assert (of("tis").run.seed, of("tis").learner.lr, of("tis").generator.count) == (5, 1e-3, 1)
    # One generator of eight is broken: the truth drops an eighth of the groups, and needs no broken generator.
    assert (of("tis", "faulty").algorithm.groups_per_update, of("tis", "faulty").generator.count) == (8, 0)
    assert (of("truth_tis", "faulty").algorithm.groups_per_update, of("truth_tis", "faulty").generator.count) == (7, 1)


# --- resuming -------------------------------------------------------------------------------------


def finished(root: Path, cell: Cell, cpu_s: float = 30.0) -> Path:
    folder = root / cell.name
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"update": 0}\n')
    (folder / runs.FACTS).write_text(json.dumps({"cpu_s": cpu_s, "wall_s": 1.0, "load": 0.5}))
    return folder


def test_finished_cells_are_not_run_again_and_broken_ones_are(tmp_path: Path) -> None:
    wanted = cells(["tis", "grpo", "r3"], ["async16"], ["healthy"], ["fp32"], [1])
    finished(tmp_path, wanted[0], 20.0)
    (finished(tmp_path, wanted[1], 40.0) / runs.FACTS).unlink()
    assert runs.todo(wanted, tmp_path) == wanted[1:]
    assert runs.cost(tmp_path) == 20.0
    assert runs.budget(wanted[1:], tmp_path, 2) == (
        "2 cells to run, 20 CPU s each (the mean of the finished cells): 1 CPU minutes; about 0 minutes on 2 idle cores"
    )
    assert "a guess: none was measured yet" in runs.budget(wanted, tmp_path / "empty", 1)


def test_a_dry_run_lists_and_estimates_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(tmp_path, PLAIN, 60.0)
    words = ["train", "--methods", "tis,grpo", "--regimes", "async16", "--seeds", "3", "--dir", str(tmp_path)]
    assert staleness_study.main([*words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f"finished {PLAIN.name}" in out
    assert "to run   grpo--async16--healthy--fp32--s3: asyncrl run configs/quickstart.yaml" in out
    assert "1 cells to run, 60 CPU s each" in out
    assert [p.name for p in tmp_path.iterdir()] == [PLAIN.name]


def test_a_cell_that_fails_is_reported_and_leaves_no_facts(tmp_path: Path) -> None:
    said: list[str] = []
    # asyncrl itself refuses it, at once.
    broken = Size(lr=2.0)
    remains = tmp_path / PLAIN.name
    remains.mkdir()
    (remains / "old").touch()
    assert runs.run_all([PLAIN], tmp_path, broken, 1, said.append) == 1
    assert "status 2" in said[-1]
    assert not (remains / "old").exists() and not runs.is_finished(remains)
    assert "learner.lr" in (tmp_path / f"{PLAIN.name}.log").read_text()


def test_a_cell_that_another_process_runs_is_left_to_it(tmp_path: Path) -> None:
    said: list[str] = []
    with open(tmp_path / f"{PLAIN.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # It could not run anyway: the learning rate is refused.
        assert runs.run_all([PLAIN], tmp_path, Size(lr=2.0), 1, said.append) == 0
    assert said[-1] == f"{PLAIN.name}: another process runs it"
    assert runs.run_all([PLAIN], tmp_path, Size(lr=2.0), 1, said.append) == 1


# --- numbers --------------------------------------------------------------------------------------


def test_mean_and_standard_error_by_hand() -> None:
    # Squares of the deviations from 2.5: 5; variance 5/3; se sqrt(5/12).
    e = estimate([1.0, 2.0, 3.0, 4.0])
    assert (e.mean, e.n) == (2.5, 4)
    assert e.se == pytest.approx(math.sqrt(5 / 12))
    assert str(e) == "2.500 +- 0.645"
    assert str(estimate([0.5])) == "0.500" and str(estimate([])) == "-"


def test_paired_differences_use_the_seeds_that_both_have() -> None:
    found = paired({1: 0.5, 2: 0.7, 3: 0.9, 9: 0.0}, {1: 0.4, 2: 0.9, 3: 0.4, 8: 1.0})
    # Differences .1, -.2, .5: mean .4/3, deviations from it squared sum to .2466..., variance .1233....
    assert found.estimate.n == 3 and found.above == 2
    assert found.estimate.mean == pytest.approx(0.4 / 3)
    assert found.estimate.se == pytest.approx(math.sqrt((0.01 + 0.04 + 0.25 - 0.16 / 3) / 2 / 3))
    # Pairing takes away what the seeds share.
    assert paired({1: 1.0, 2: 5.0}, {1: 0.5, 2: 4.5}).estimate.se == 0.0
    assert not paired({1: 1.0}, {2: 1.0}).estimate.n


def test_p_values_of_students_t() -> None:
    assert p_value(3.182, 3) == pytest.approx(0.05, abs=1e-4)
    assert p_value(2.228, 10) == pytest.approx(0.05, abs=1e-4)
    assert p_value(0.0, 3) == pytest.approx(1.0)


def record(update: int, f_2: float, grad: float = 1.0) -> dict[str, float]:
    return {
        "update": update, "policy/reward": 0.5, "mismatch/kl_k3": 0.1, "mismatch/f_2": f_2, "optim/grad_norm": grad,
        "drift/mean": 0.02, "staleness/lag_mean": 12.0, "filter/dropped": 5.0,
    }  # fmt: skip


def evaluation(update: int, sampled: float) -> dict[str, float]:
    return {"update": update, "eval/sampled_accuracy": sampled, "eval/greedy_accuracy": 0.9}


def test_a_result_is_read_from_the_records() -> None:
    facts = {"cpu_s": 30.0, "wall_s": 40.0, "load": 1.0}
    f_2 = [0.0, 0.2, 0.2, 0.0, 0.2, 0.2, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0]
    records = [record(i, v, grad=float(i)) for i, v in enumerate(f_2)]
    records += [evaluation(12, 0.4), evaluation(0, 0.2), evaluation(6, 0.8)]
    r = result_of(PLAIN, records, facts)
    assert (r.best, r.last, r.greedy) == (0.8, 0.4, 0.9)
    assert r.area == pytest.approx(0.6)
    assert (r.alarms, r.sustained, r.max_grad) == (5, 6, 11.0)
    # Of the last ten: 0.2 at 2, 4, 5 and 6.
    assert r.tail("F(2)") == pytest.approx(0.08)
    table = outcome_table(grouped([r])["async16", "healthy", "fp32"]["tis"] and {"tis": {3: r}})
    assert table[1][:4] == ["tis", "1", "0.800", "0.400"]
    text = tables_text([r], [])
    assert "### async16, healthy fleet, fp32 rollouts" in text and "| tis | 1 | 0.800 | 0.400 |" in text


# --- the probe ------------------------------------------------------------------------------------


def test_cosine_of_hand_made_gradients() -> None:
    gradients = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -3.0]])
    target = torch.tensor([1.0, 1.0])
    sums = Sums(gradients)
    along = sums.towards(target)
    assert sums.cosine(torch.tensor([True, True, False]), along) == pytest.approx(1.0)
    # (1, -2) with (1, 1): -1 / (sqrt 5 sqrt 2), whatever the length of the target.
    everything = torch.tensor([True, True, True])
    assert sums.cosine(everything, along) == pytest.approx(-1 / math.sqrt(10))
    assert sums.cosine(everything, sums.towards(7 * target)) == pytest.approx(-1 / math.sqrt(10))
    assert cosine(gradients.sum(0), target) == pytest.approx(-1 / math.sqrt(10))
    assert math.isnan(cosine(torch.zeros(2), target)) and math.isnan(sums.cosine(~everything, along))
    # The oracle drops what points against the reference, and as many as q says.
    assert oracle_keep(along, 0.34).tolist() == [True, True, False]
    assert oracle_keep(along, 0.0).all()


def test_auc_by_hand() -> None:
    bad = torch.tensor([True, False, False, True])
    assert auc(torch.tensor([3.0, 1.0, 2.0, 1.0]), bad) == pytest.approx((1 + 1 + 0.5 + 0) / 4)
    assert math.isnan(auc(torch.tensor([1.0, 2.0]), torch.tensor([True, True])))


def test_how_the_cells_sample() -> None:
    by_name = {c.name: c for c in CELLS}
    assert len(by_name) == len(CELLS)
    how, broken = how_sampled(by_name["mixed_lags, lag 0-16, fp8, tis"], 40, 0)
    assert [40 - s.weights for s in how] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 16]
    assert not any(broken) and {s.kind.precision for s in how} == {"fp8"}
    how, broken = how_sampled(by_name["missed_syncs, lag 4, fp32, tis"], 40, 1)
    assert sum(broken) == PROMPTS // 8
    # It says lag 4 and holds weights 16 updates older.
    assert {(s.label, s.weights) for s, bad in zip(how, broken, strict=True) if bad} == {(36, 20)}
    assert {s for s, bad in zip(how, broken, strict=True) if not bad} == {Sampling(Kind(), 36, 36)}


def test_the_probe_table_compares_with_none_and_with_random() -> None:
    def batch(none: float, drift: float) -> dict:
        filters = [
            {"signal": "none", "gate": "", "q": 0.0, "cosine": none, "random": none, "dropped": 0.0},
            {"signal": "drift", "gate": "top_q", "q": 0.08, "cosine": drift, "random": none - 0.1, "dropped": 0.08},
        ]
        return {"cells": {"c": {"filters": filters}}}

    batches = [batch(0.5, 0.6), batch(0.7, 0.7)]
    head, line = probe_table(batches, "top_q", 0.08)
    # Gains .1 and 0; random costs .1; drift minus random .2 and .1.
    assert dict(zip(head, line, strict=True)) == {
        "batch": "c", "cosine, no filter": "0.600 +- 0.100", "random - none": "-0.100 +- 0.000",
        "drift - none": "+0.050 +- 0.050", "drift - random": "+0.150 +- 0.050 *",
        "log_ratio - none": "", "log_ratio - random": "", "lag - none": "", "lag - random": "",
        "truth - none": "", "truth - random": "", "oracle - none": "",
    }  # fmt: skip
    # One comparison with either; only the one with random is beyond two standard errors.
    assert tally_table(batches)[1] == ["drift", "top_q", "1", "0", "0", "1", "0"]
    assert markdown([head[:2], line[:2]]).splitlines()[1] == "|---|---|"


# --- faults ---------------------------------------------------------------------------------------


def test_faults_change_the_weights_that_they_should() -> None:
    w = torch.linspace(-1, 1, 64).view(2, 32)
    names = [f"model.layers.0.mlp.experts.{e}.up_proj.weight" for e in range(3)]
    given = {name: w * (i + 1) for i, name in enumerate(names)} | {"model.layers.0.mlp.gate.weight": w}
    swapped = changed(given, Kind(fault="swapped"))
    assert torch.equal(swapped[names[0]], given[names[1]]) and torch.equal(swapped[names[1]], given[names[0]])
    assert torch.equal(swapped[names[2]], given[names[2]])
    for kind in (Kind(fault="int4"), Kind("fp8")):
        found = changed(given, kind)
        assert not torch.equal(found[names[0]], w)
        # Routers stay as they are.
        assert torch.equal(found["model.layers.0.mlp.gate.weight"], w)
    assert len(fake_int4(w)[0].unique()) <= 15
    assert (fake_int4(w) - w).abs().max() <= 0.5 / 7 + 1e-6
    x = torch.tensor([[448.0, 1.0, 17.0], [0.0, 0.0, 0.0]])
    # Three bits of mantissa: between 16 and 18 the even one.
    assert fake_fp8_activation(x).tolist() == [[448.0, 1.0, 16.0], [0.0, 0.0, 0.0]]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_char_model(tmp_path_factory.mktemp("char") / "model", steps=0)


@pytest.fixture(scope="module")
def lab(tiny_model: Path) -> Lab:
    words = ["algorithm.groups_per_update=2", "algorithm.group_size=4", "task.train_size=64", "task.eval_size=16"]
    made = Lab(study_config(str(tiny_model), Size(), words))
    yield made
    made.close()


def test_a_tiny_probe_on_a_real_model(lab: Lab, tmp_path: Path) -> None:
    a, prompts = lab.config.algorithm, lab.prompts[:2]
    history = {0: lab.weights()}
    history[1] = {name: t + 0.05 * torch.randn(t.shape, generator=torch.Generator().manual_seed(1)) for name, t in
                  history[0].items()}  # fmt: skip
    save(history, tmp_path / "h.safetensors")
    history = restore(tmp_path / "h.safetensors")
    how = [Sampling(Kind(), 0, 0), Sampling(Kind("fp8", "noise"), 1, 1)]
    groups = lab.sample(prompts, how, history, 4, seed=7)
    again = lab.sample(prompts, how, history, 4, seed=7)
    assert [t.token_ids.tolist() for t in groups[0].trajectories] == [
        t.token_ids.tolist() for t in again[0].trajectories
    ]
    rows = lab.rows(groups, 1)
    assert [r.max_lag for r in rows] == [1] * 4 + [0] * 4
    table = scored_table(lab.policy, rows, lab.config, lab.info)
    # Group 0 was sampled with the weights that score it; the others with noisy, rounded and other ones.
    assert np.allclose(table["drift"][:4], 0) and (table["drift"][4:] > 0).any()
    assert np.allclose(table["abs_log_ratio"][:4], 0, atol=1e-4) and (table["abs_log_ratio"][4:] > 1e-3).all()
    # Random weights earn nothing, so the advantages are made up.
    advantages = torch.tensor([1.0, -1.0, 0.5, 0.0, 1.0, 2.0, -1.0, -2.0])
    tokens = float(table["tokens"].sum())
    each = response_gradients(lab.policy, rows, advantages, tokens, a, lab.info)
    whole = batch_gradient(lab.policy, rows, advantages, tokens, a, lab.info)
    assert not each[3].any() and each[0].any()
    assert torch.allclose(each.sum(0), whole, atol=1e-6) and cosine(each.sum(0), whole) == pytest.approx(1.0, abs=1e-4)
    filters = keeps(table, torch.tensor([False] * 4 + [True] * 4), a, 1)
    truth = next(f for f in filters if f["signal"] == "truth")
    assert truth["keep"].tolist() == [True] * 4 + [False] * 4
    assert all(int((~m).sum()) == 4 for m in truth["control"])
    dropped = {(f["signal"], f["q"]): int((~f["keep"]).sum()) for f in filters if f["gate"] == "top_q"}
    assert dropped["log_ratio", 0.2] >= 1 and {s for s, _ in dropped} == {"drift", "log_ratio", "lag"}
    for f in filters:
        assert all(int((~m).sum()) == int((~f["keep"]).sum()) for m in f["control"])


def test_one_prompt_in_eight_goes_to_the_broken_engine(tiny_model: Path) -> None:
    prompts = [np.array([i % 10, i // 10 % 10, i // 100], np.int32) for i in range(400)]
    assert 25 <= sum(is_faulty(p) for p in prompts) <= 75
    good = make_engine(tiny_model, Kind(), 0, 8)
    both = OneIn(good, make_engine(tiny_model, Kind(fault="noise"), 1, 8))
    bad_prompt = next(p for p in prompts if is_faulty(p))
    params = SamplingParams(1.0, 4, (1,), seed=3)
    try:
        mine = asyncio.run(both.generate(bad_prompt, 2, params))
        healthy = asyncio.run(good.generate(bad_prompt, 2, params))
        # Evaluation, one response at a time, is the good one's.
        one = asyncio.run(both.generate(bad_prompt, 1, params))
        alone = asyncio.run(good.generate(bad_prompt, 1, params))
        assert both.version == Version(0, -1)
    finally:
        both.close()
    assert any(not np.array_equal(a.routes[:3], b.routes[:3]) for a, b in zip(mine, healthy, strict=True))
    assert one[0].token_ids.tolist() == alone[0].token_ids.tolist()


# --- the page -------------------------------------------------------------------------------------


def test_the_tables_are_replaced_and_the_prose_stays() -> None:
    page = f"# Study\n\nWords.\n\n{BEGIN}\nold\n{END}\n\nMore words.\n"
    new = replaced(page, "| a |\n|---|\n| 1 |")
    assert new == f"# Study\n\nWords.\n\n{BEGIN}\n\n| a |\n|---|\n| 1 |\n\n{END}\n\nMore words.\n"
    assert replaced(new, "x") == replaced(page, "x")
    with pytest.raises(ValueError, match="needs the lines"):
        replaced("# Study", "x")
    html = html_page(new, [("A <curve>", "data:image/png;base64,xx")])
    assert "<td>1</td>" in html and "A &lt;curve&gt;" in html and "http" not in html
