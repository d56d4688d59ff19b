"""What a user sees: every page and chart of the dashboard holds the numbers of metrics.jsonl, in a real browser."""

import math
import re

import numpy as np
import pytest
from tensorboard_page import Dashboard, histograms, texts

from asyncrl.metrics.layout import OPENED, Band, dashboard
from asyncrl.metrics.names import NAMES, pattern
from asyncrl.metrics.sink import Sink, read_jsonl, timeline

UPDATES = 12
VARIABLE = {
    "<id>": ("host-a.g0", "host-b.g1"),
    "<reason>": ("stale", "capacity"),
    "<set>": ("aime24", "gsm8k"),
    "<word>": ("form", "length"),
    "<k>": ("2", "8"),
    "<name>": ("f_2", "kl_rising"),
    "<lags>": ("0", "1", "2-3", "4-7"),
    "<part>": ("first", "middle", "last"),
    "<i>": ("0", "1"),
    "<l>": ("0", "47"),
    "<n>": ("0", "12"),
    "<d>": ("0", "9"),
}


def every_name() -> list[str]:
    """All names that a record can have, two or more for each that varies."""
    names = list(NAMES)
    for variable, values in VARIABLE.items():
        names = [name.replace(variable, v) for name in names for v in (values if variable in name else ("",))]
    literal = {t for charts in dashboard().values() for c in charts.values() if not isinstance(c, Band) for t in c}
    plain = {re.sub(r"\\(.)", r"\1", t[1:-1]) for t in literal}
    return names + sorted(n for n in plain if re.fullmatch(r"[a-z0-9_./]+", n) and n not in names)


def values(names: list[str], update: int) -> dict[str, float]:
    return {name: round(math.sin(i + update / 3) + i / 7, 6) for i, name in enumerate(names)}


def drawn_names(chart, names: list[str]) -> set[str]:
    """Metrics that a chart of the layout shows, of those that exist."""
    return {chart.value} if isinstance(chart, Band) else {n for n in names for tag in chart if re.match(tag, n)}


def points_of(records: list[dict[str, float]], name: str) -> list[tuple[int, float]]:
    return [(int(r["update"]), r[name]) for r in records if name in r]


def same(shown: list[tuple[int, float]], written: list[tuple[int, float]]) -> bool:
    """Equal steps, and values equal as float32, which is what TensorBoard keeps."""
    return [x for x, _ in shown] == [x for x, _ in written] and np.array_equal(
        np.float32([y for _, y in shown]), np.float32([y for _, y in written]), equal_nan=True
    )


def bare(lines: dict) -> dict:
    """Lines by metric name; TensorBoard adds the name of the run in brackets."""
    return {name.rpartition(" (")[0]: points for name, points in lines.items()}


def test_every_page_and_chart_shows_what_metrics_jsonl_holds(tmp_path, browser, board):
    names = every_name()
    with Sink(tmp_path / "run") as sink:
        for update in range(UPDATES):
            sink.write(update, values(names, update))
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    layout = dashboard()
    page = Dashboard(browser, board(tmp_path / "run"))
    assert page.pages() == list(layout)
    assert page.opened() == list(layout)[:OPENED]
    for title, charts in layout.items():
        page.show(title)
        shown = page.charts(title)
        # TensorBoard draws bands last, in an order of its own.
        lines_first = [t for t, c in charts.items() if not isinstance(c, Band)]
        assert list(shown)[: len(lines_first)] == lines_first and set(shown) == set(charts), title
        for chart, lines in shown.items():
            expected = drawn_names(charts[chart], names)
            assert set(bare(lines)) == expected and expected, (title, chart)
            for name, points in bare(lines).items():
                assert len(points) == UPDATES and same(points, points_of(records, name)), (title, chart, name)


def test_a_resumed_run_has_one_value_per_update_and_a_gap_where_a_value_is_no_number(tmp_path, browser, board):
    folder = tmp_path / "run"
    for epoch, (first, last) in enumerate([(0, 9), (5, 11)]):
        with Sink(folder, first_update=first, resumed=epoch > 0) as sink:
            sink.text(first, "run/config", "max_lag: 8")
            for update in range(first, last + 1):
                loss = math.nan if update == 7 else update + epoch / 10
                sink.write(update, {"policy/loss": loss, "policy/reward": 0.5, "run/epoch": float(epoch)})
    page = Dashboard(browser, board(folder))
    page.show("Policy")
    loss = bare(page.charts("Policy")["loss"])["policy/loss"]
    assert same(loss, points_of(timeline(read_jsonl(folder / "metrics.jsonl")), "policy/loss"))
    assert [x for x, _ in loss] == list(range(12)) and math.isnan(loss[7][1]) and loss[6][1] == pytest.approx(6.1)


def test_histograms_and_texts_are_on_their_tabs_once(tmp_path, browser, board):
    folder, rng = tmp_path / "run", np.random.default_rng(0)
    drawn = {
        "staleness/lag": rng.integers(0, 5, 200).astype(float),
        "drift/response": rng.random(200) / 10,
        "mismatch/log_ratio": rng.normal(0, 0.1, 200),
    }
    with Sink(folder) as sink:
        sink.text(0, "run/config", "```yaml\nstaleness:\n  max_lag: 8\n```")
        for update in range(8):
            sink.write(update, {"policy/reward": 0.5}, drawn if update % 2 == 0 else None)
        sink.text(3, "run/tuned", "`staleness.max_lag`: 8 -> 4")
        sink.text(7, "run/alarms", "`f_2` is on")
    with Sink(folder, first_update=5, resumed=True) as sink:
        sink.text(5, "run/config", "```yaml\nstaleness:\n  max_lag: 8\n```")
        sink.write(5, {"policy/reward": 0.5})
        sink.write(6, {"policy/reward": 0.5}, drawn)
    url = board(folder)
    shown = histograms(browser, url)
    assert set(shown) == set(drawn)
    for tag, steps in shown.items():
        assert sorted(steps) == [0, 2, 4, 6], tag
        assert sum(count for _, _, count in steps[6]) == pytest.approx(200), tag
    edges = [x for x, _, _ in shown["mismatch/log_ratio"][0]]
    assert edges[0] < -0.1 and edges[-1] > 0.1  # two-sided
    found = texts(browser, url, ("run/config", "run/tuned"))
    assert [step for step, _ in found["run/config"]] == [0] and "max_lag: 8" in found["run/config"][0][1]
    assert [step for step, _ in found["run/tuned"]] == [3] and "<code>staleness.max_lag</code>" in found["run/tuned"][
        0
    ][1]
    assert "run/alarms" not in found  # of an update that was undone


def test_charts_of_what_a_run_never_has_are_not_shown(tmp_path, browser, board):
    with Sink(tmp_path / "run", absent=("r3/", "r2/", "sentinel/")) as sink:
        sink.write(0, {"policy/reward": 0.5, "drift/mean": 0.1})
    page = Dashboard(browser, board(tmp_path / "run"))
    assert page.pages() == [p for p in dashboard() if p != "Sentinel"]
    page.show("Router drift")
    assert not [title for title in page.charts("Router drift") if "replay" in title]
    assert pattern("r3/forced_fraction") not in dashboard(("r3/", "r2/"))["Router drift"]
