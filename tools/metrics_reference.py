"""Write docs/metrics.md from asyncrl/metrics/names.py.

python tools/metrics_reference.py docs/metrics.md            write it
python tools/metrics_reference.py --check docs/metrics.md    exit 1 when it is out of date
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from asyncrl.metrics.layout import dashboard
from asyncrl.metrics.names import NAMES

HEAD = """# Metrics

Generated from `asyncrl/metrics/names.py` by `make docs`; do not edit. `metrics.jsonl` in the run folder and
TensorBoard hold the same numbers: one record per update, `{"update": u, "time": seconds, "name": value, ...}`, and one
per evaluation. What has no value in an update (the mean of nothing) is left out or NaN. mu is the policy that sampled,
pi the learner's. Means are over all ranks, weighted by what they count.
"""


def page() -> str:
    lines = [HEAD.rstrip(), "", f"Dashboard pages: {', '.join(dashboard())}."]
    for unit, names in groupby(NAMES, key=lambda name: name.split("/")[0]):
        lines += ["", f"## `{unit}/`", "", "| name | what |", "| --- | --- |"]
        for name in names:
            what = NAMES[name].replace("|", "\\|")
            lines.append(f"| `{name}` | {what} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    (target,) = [Path(a) for a in sys.argv[1:] if not a.startswith("--")]
    if "--check" not in sys.argv:
        target.write_text(page(), encoding="utf-8")
        return 0
    if not target.exists() or target.read_text(encoding="utf-8") != page():
        print(f"{target} is out of date; run `make docs`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
