"""The methods study: its rows, differences and page, and the figures' files; no run."""

from __future__ import annotations

import math
from pathlib import Path

import methods_study
import pytest
from bench.methods import config_of, ratios, sampled, table, take_of
from study.method_figures import write_figures
from study.methods import (
    BEGIN,
    END,
    EXTRA,
    FAMILIES,
    LR,
    NAMED,
    by_method,
    differences,
    family_of,
    family_table,
    far_apart,
    named_table,
    ordered,
    tables_text,
    write_page,
)
from study.plan import FILES, Cell, Size, arguments
from study.results import Result, result_of

from asyncrl.cli import read
from asyncrl.learner.shard import World
from asyncrl.models.describe import describe
from tests.helpers.char_model import save_char_model


def made(method: str, seed: int, last: float, kl: float = 0.01, regime: str = "async16x4") -> Result:
    records = [
        {"update": u, "policy/reward": 0.5, "mismatch/kl_k3": kl, "mismatch/f_2": 0.0, "optim/grad_norm": 1.0 + u,
         "staleness/lag_mean": 12.0, "policy/clip_fraction": 0.02}
        for u in range(4)
    ]  # fmt: skip
    records += [
        {"update": u, "eval/sampled_accuracy": a, "eval/greedy_accuracy": 0.9}
        for u, a in ((0, 0.2), (2, 0.8), (4, last))
    ]
    facts = {"cpu_s": 30.0, "wall_s": 40.0, "load": 1.5}
    return result_of(Cell(method, regime, "healthy", "fp32", seed), records, facts)


def test_every_file_is_in_the_study_once_and_an_unknown_one_comes_last() -> None:
    assert sorted(ordered()) == sorted((*FILES, *EXTRA))
    found = ordered(("tis", "a_new_one", "grpo"))
    assert found == ["grpo", "tis", "a_new_one"]
    assert family_of("a_new_one") == "other" and family_of("tis") == "correction"
    members = [m for family in FAMILIES.values() for m in family]
    assert len(set(members)) == len(members) and set(NAMED) <= set(members)


def test_every_method_runs_in_takes_of_several_updates_at_lag_16() -> None:
    for method in ordered():
        config = read(arguments(Cell(method, methods_study.REGIME, "healthy", "fp32", 1), Size(lr=LR), "runs"))
        s = config.staleness
        assert (s.sync_every, s.updates_per_take, s.max_lag, config.learner.lr) == (4, 4, 16, 5e-4)


def test_results_are_sorted_by_family_and_only_of_the_regime() -> None:
    results = [made("tis", 2, 0.7), made("tis", 1, 0.6), made("grpo", 1, 0.5), made("r3", 1, 0.5, regime="async16")]
    found = by_method(results)
    assert list(found) == ["grpo", "tis"]
    assert list(found["tis"]) == [1, 2]


def test_a_row_by_hand() -> None:
    methods = by_method([made("tis", 1, 0.6), made("tis", 2, 0.8)])
    head, row = named_table(methods)
    got = dict(zip(head, row, strict=True))
    assert got["method"] == "GRPO + TIS" and got["seeds"] == "2"
    # Mean of 0.6 and 0.8, s = 0.1414, over sqrt 2.
    assert got["last acc"] == "0.700 +- 0.100"
    # Means over the evaluations but the first: (0.8 + 0.6) / 2 and (0.8 + 0.8) / 2.
    assert (
        got["mean acc"] == "0.750 +- 0.050"
        and got["early acc"] == "0.800 +- 0.000"
        and got["best acc"] == "0.800 +- 0.000"
    )
    assert (got["max grad norm"], got["clipped"], got["lag"], got["weight"]) == ("4.0", "0.0200", "12.0", "")
    assert family_table(methods)[1][:2] == ["correction", "`tis`"]


def test_differences_are_paired_by_seed() -> None:
    methods = by_method([made("tis", 1, 0.6), made("tis", 2, 0.8), made("tis", 3, 0.7), made("gspo", 1, 0.5, kl=0.1),
                         made("gspo", 2, 0.8)])  # fmt: skip
    rows = differences(methods)
    assert len(rows) == 2 and rows[1][0] == "`gspo`"
    # -0.1 and 0: one mean of two pairs, none above; seed 3 has no partner. log10 of 0.1 / 0.01 and of 1.
    assert rows[1][1] == "-0.050 +- 0.050 (0/2, p 0.5)"
    assert rows[1][5] == "+0.500 +- 0.500 (1/2, p 0.5)"
    head, first, *_, last = far_apart(methods)
    assert head == ["p below", "last acc: of 1", "mean acc: of 1", "early acc: of 0", "by chance"]
    assert first == ["0.05", "0", "0", "0", "0.1"]
    # Differences of the mean accuracy are half as large: the evaluation at update 2 is the same in all. Those of the
    # early accuracy are all 0, and have no p.
    assert last == ["median standard error", "0.050", "0.025", "", ""]
    assert differences(by_method([made("gspo", 1, 0.5)])) == [["no run of", "tis"]]


def test_a_run_without_a_finite_mismatch_has_a_row() -> None:
    broken = made("gmpo", 1, 0.3)
    broken = broken._replace(curves=broken.curves | {"kl_k3": []})
    assert math.isnan(broken.tail("kl_k3"))
    assert dict(zip(*named_table(by_method([broken, made("tis", 1, 0.5)])), strict=True))["method"] == "GRPO + TIS"
    head, row = family_table(by_method([broken]))
    assert row[head.index("kl_k3")] == "-"


def test_the_page_keeps_its_prose(tmp_path: Path) -> None:
    page = tmp_path / "methods_study.md"
    page.write_text(f"# Page\n\nWords.\n\n{BEGIN}\nold\n{END}\n\nMore.\n")
    results = [made("tis", 1, 0.6), made("grpo", 1, 0.5)]
    write_page(results, page)
    text = page.read_text()
    assert text.startswith("# Page\n\nWords.\n") and text.endswith(f"{END}\n\nMore.\n") and "\nold\n" not in text
    assert tables_text(results) in text and "| GRPO + TIS | 1 | 0.600 |" in text
    again = [made("tis", 1, 0.3), made("gmpo", 1, 0.3)]
    write_page(results, page, {"another rate": again})
    below = page.read_text().partition("### Nine methods, another rate")[2]
    # Only what the first table has.
    assert "| GRPO + TIS | 1 | 0.300 |" in below and "gmpo" not in below
    assert "load average at their start 1.5 to 1.5, median 1.5. Mean lag of a run: 12.0 to 12.0" in text
    page.write_text("# Page\n")
    with pytest.raises(ValueError, match="needs the lines"):
        write_page(results, page)


def test_a_figure_per_method_and_the_same_bytes_again(tmp_path: Path) -> None:
    methods = by_method([made("tis", 1, 0.6), made("grpo", 1, 0.5), made("gspo", 1, 0.7), made("gspo", 2, 0.4)])
    files = write_figures(methods, tmp_path / "images")
    assert [f.name for f in files] == ["grpo.svg", "gspo.svg", "tis.svg"]
    first = files[1].read_bytes()
    assert b">held-out accuracy<" in first and b">gspo<" in first and b">tis<" in first
    assert not any(line.endswith(b" ") for line in first.splitlines())
    assert len(first) < 60_000
    assert write_figures(methods, tmp_path / "images")[1].read_bytes() == first


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--dir", str(tmp_path)]
    assert methods_study.main(["train", "--methods", "ppo", *where]) == 2
    assert methods_study.main(["report", "--docs", str(tmp_path), *where]) == 1
    assert "holds no finished cell of async16x4" in capsys.readouterr().err
    assert methods_study.main(["train", "--methods", "tis,grpo", "--seeds", "1", "--dry-run", *where]) == 0
    out = capsys.readouterr().out
    assert "to run   tis--async16x4--healthy--fp32--s1: asyncrl run configs/quickstart.yaml" in out
    assert not list(tmp_path.iterdir())


# --- what a method costs --------------------------------------------------------------------------


def test_costs_are_ratios_of_neighbours_and_the_first_alternates() -> None:
    seen: list[tuple[str, int]] = []

    def take(name: str):
        return lambda update: seen.append((name, update))

    cost = {"grpo": 2.0, "gspo": 3.0}
    takes = {name: take(name) for name in cost}

    def clock(one, update: int) -> float:
        one(update)
        # A machine that gets slower: neighbours are hit alike.
        return cost[seen[-1][0]] * update

    found = ratios(takes, 3, clock)
    assert found == {"gspo": [1.5, 1.5, 1.5], "grpo": [8.0, 16.0, 24.0]}
    # Each once to get warm; then side by side.
    assert seen == [("grpo", 0), ("gspo", 0), ("grpo", 4), ("gspo", 4), ("gspo", 8), ("grpo", 8), ("grpo", 12),
                    ("gspo", 12)]  # fmt: skip
    assert table(found).splitlines()[2:] == ["| `grpo` | 1 (16000 ms) | |", "| `gspo` | 1.50 | 1.50 to 1.50 |"]


def test_the_costs_are_of_the_quickstart_in_takes_of_four() -> None:
    for method in ordered():
        config = config_of(method)
        assert (config.staleness.updates_per_take, config.algorithm.groups_per_update) == (4, 32)


def test_a_take_of_real_responses(tmp_path: Path, world: World) -> None:
    words = [f"model.path={save_char_model(tmp_path / 'model', steps=0)}", "task.train_size=64", "task.eval_size=16"]
    replaying = config_of("r3", *words)
    groups = sampled(replaying, 4, 0)
    assert [len(g.trajectories) for g in groups] == [8] * 4
    assert all(t.routes is not None for g in groups for t in g.trajectories)
    info = describe(replaying.model.path)
    for config in (replaying, config_of("kl_loss", *words)):
        scalars = take_of(config, groups, info, world)(0)
        # The last update of the take has one of the four groups.
        assert scalars["policy/responses"] == 8 and math.isfinite(scalars["optim/grad_norm"])
