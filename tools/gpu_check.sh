#!/bin/sh
# Does the learner work, and how fast, on this machine's GPU? Under 5 minutes; docs/gpu.md says what it prints.
#   tools/gpu_check.sh [--device auto|cpu|cuda] [--size tiny|1b] [--updates N] [--no-compile] [--json FILE]
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python="$root/.venv/bin/python"
[ -x "$python" ] || python=python3
export OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec "$python" "$root/tools/gpu_check.py" "$@"
