"""TensorBoard event files: scalars, histograms, texts and the dashboard layout.

Writes protocol buffers itself, so neither torch nor TensorFlow is needed. Imports tensorboard when
an EventWriter is made, never before. Knows no metric by name.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.metrics.layout import OPENED, Band, Chart, Layout

_LAYOUT_TAG = "custom_scalars__config__"  # fixed by TensorBoard's custom scalars plugin


class EventWriter:
    """One event file in `directory`, flushed after every record.

    first_update > 0 tells readers to forget older points from that update on (a resumed run).
    """

    def __init__(self, directory: Path, layout: Layout, first_update: int = 0) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event_pb2 = event_pb2
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 1000:019d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (directory / name).open("wb")
        self._records = RecordWriter(self._file)
        self._put(file_version="brain.Event:2")
        start = event_pb2.SessionLog.START
        self._put(step=first_update, session_log=event_pb2.SessionLog(status=start))
        self._put(summary=_layout_summary(layout))
        self._file.flush()

    def write(
        self,
        update: int,
        scalars: Mapping[str, float],
        histograms: Mapping[str, NDArray[Any]] | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """One point per name at step `update`; empty histograms are left out."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.histogram.summary import histogram_pb
        from tensorboard.plugins.text.summary import text_pb

        points = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._put(step=update, summary=Summary(value=points))
        for name, values in (histograms or {}).items():
            finite = np.asarray(values, np.float64)
            finite = finite[np.isfinite(finite)]
            if finite.size:
                self._put(step=update, summary=histogram_pb(name, finite))
        for name, text in (texts or {}).items():
            self._put(step=update, summary=text_pb(name, text))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _put(self, **fields: Any) -> None:
        event = self._event_pb2.Event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())


def _layout_summary(layout: Layout) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.plugins.custom_scalar import layout_pb2

    categories: list[Any] = []
    for page, charts in layout.items():
        built = [_chart(title, chart) for title, chart in charts.items()]
        closed = len(categories) >= OPENED
        categories.append(layout_pb2.Category(title=page, chart=built, closed=closed))
    message = layout_pb2.Layout(category=categories)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="custom_scalars"))
    tensor = TensorProto(dtype="DT_STRING", string_val=[message.SerializeToString()], tensor_shape=TensorShapeProto())
    return Summary(value=[Summary.Value(tag=_LAYOUT_TAG, tensor=tensor, metadata=metadata)])


def _chart(title: str, chart: Chart) -> Any:
    from tensorboard.plugins.custom_scalar import layout_pb2

    if not isinstance(chart, Band):
        return layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=list(chart)))
    series = layout_pb2.MarginChartContent.Series(value=chart.value, lower=chart.lower, upper=chart.upper)
    return layout_pb2.Chart(title=title, margin=layout_pb2.MarginChartContent(series=[series]))
