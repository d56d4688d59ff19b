"""The dashboard: written to the events file as TensorBoard reads it, naming only what a record can contain."""

import re

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from asyncrl.metrics.layout import Band, dashboard
from asyncrl.metrics.names import NAMES, VARIABLES, is_known, pattern
from asyncrl.metrics.sink import Sink

PAGES = [
    "Policy", "Mismatch", "Gradient norm", "Evaluation", "Staleness", "Router drift", "Throughput", "Fleet", "Alarms",
    "Sentinel", "Settings",
]  # fmt: skip
EXAMPLES = {"<id>": "host-a.g0", "<reason>": "stale", "<part>": "first", "<lags>": "2-3", "<name>": "f_2"}


def example(name: str) -> str:
    """A concrete metric name for a name of the table."""
    for variable in VARIABLES:
        name = name.replace(variable, EXAMPLES.get(variable, "12"))
    return name


def read_layout(run_dir) -> layout_pb2.Layout:
    accumulator = EventAccumulator(str(run_dir / "tb"))
    accumulator.Reload()
    (event,) = accumulator.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout()
    layout.ParseFromString(event.tensor_proto.string_val[0])
    metadata = accumulator.SummaryMetadata("custom_scalars__config__")
    assert metadata.plugin_data.plugin_name == "custom_scalars"
    return layout


def test_the_layout_in_the_events_file_names_only_metrics_a_record_can_contain(tmp_path):
    with Sink(tmp_path) as sink:
        sink.write(0, {"policy/reward": 1.0})
    layout = read_layout(tmp_path)
    assert [category.title for category in layout.category] == PAGES
    names = [example(name) for name in NAMES]
    for category in layout.category:
        assert category.chart
        for chart in category.chart:
            assert chart.multiline.tag or chart.margin.series
            for tag in chart.multiline.tag:
                # TensorBoard uses re.match, so an open end would catch longer names too. Some charts name one instance.
                hits = [name for name in names if re.match(tag, name)]
                literal = re.sub(r"\\(.)", r"\1", tag[1:-1])
                assert len(hits) == 1 or (not hits and is_known(literal)), (chart.title, tag, hits)
            for series in chart.margin.series:  # exact names
                assert {series.value, series.lower, series.upper} <= set(NAMES)


def test_special_characters_of_a_name_are_taken_literally():
    assert re.match(pattern("mismatch/f_1.2"), "mismatch/f_1.2")
    assert not re.match(pattern("mismatch/f_1.2"), "mismatch/f_1x2")
    assert not re.match(pattern("mismatch/f_1.2"), "mismatch/f_1.25")
    assert not re.match(pattern("drift/mean"), "drift/mean_squared")


def test_open_parts_match_what_varies_and_nothing_else():
    assert re.match(pattern("drift/layer_<l>"), "drift/layer_47")
    assert not re.match(pattern("drift/layer_<l>"), "drift/layer_x")
    assert re.match(pattern("generator/<id>/drift"), "generator/host-a.g0/drift")
    assert not re.match(pattern("generator/<id>/drift"), "generator/a/b/drift")
    assert is_known("replay/dropped/zero_variance") and not is_known("replay/dropped/")


def test_every_page_is_made_of_known_names():
    assert list(dashboard()) == PAGES


def test_no_metric_name_is_matched_by_two_table_rows():
    for name in NAMES:
        hits = [row for row in NAMES if re.match(pattern(row), example(name))]
        assert hits == [name]


def test_the_first_pages_are_open_and_the_others_a_click_away(tmp_path):
    with Sink(tmp_path):
        pass
    closed = {category.title: category.closed for category in read_layout(tmp_path).category}
    assert [title for title in PAGES if not closed[title]] == ["Policy", "Mismatch", "Gradient norm"]


def test_charts_of_what_a_run_never_has_are_left_out_and_so_are_pages_without_charts(tmp_path):
    with Sink(tmp_path, absent=("r3/", "r2/", "eval/", "sentinel/")):
        pass
    layout = {c.title: [chart.title for chart in c.chart] for c in read_layout(tmp_path).category}
    assert list(layout) == [page for page in PAGES if page not in ("Sentinel", "Evaluation")]
    full = dashboard()
    assert set(full["Router drift"]) - set(layout["Router drift"]) == {
        "routing replay: share forced, drift inside the pass"
    }
    assert set(full["Policy"]) - set(layout["Policy"]) == {"held-out accuracy"}


def test_no_chart_has_more_lines_than_can_be_told_apart():
    many = {"<id>", "<reason>", "<name>"}
    for page, charts in dashboard().items():
        assert len(charts) <= 12, page  # TensorBoard shows more on a second page
        for title, chart in charts.items():
            assert isinstance(chart, Band) or len(chart) <= 4, title
    # What grows with the model or with the lag is drawn in groups.
    drawn = {tag for charts in dashboard().values() for chart in charts.values() for tag in chart}
    assert not {pattern(n) for n in NAMES if "<l>" in n or "<n>" in n} & drawn
    assert {v for v in many if any(pattern(n) in drawn for n in NAMES if v in n)} == many
