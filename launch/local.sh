#!/usr/bin/env bash
# What `asyncrl run` does, by hand: replay, the generators and the learner of one run on this machine.
# Every role is an ordinary command, so copy a line from here to start one elsewhere.
set -uo pipefail

usage() {
    cat << 'TEXT'
usage: launch/local.sh CONFIG... [key=value...]

Starts replay, the generators and the learner of one run on this machine, for example
    launch/local.sh configs/quickstart.yaml configs/methods/tis.yaml run.name=tis
Files merge from left to right: the run config first, a method or regime after it.

PYTHON=COMMAND chooses the Python; default: .venv/bin/python if there is one, else python3.
The exit status is the learner's, or 1 when replay or the last generator ends before it, 2 when the config is
refused, 128 + n after signal n.
TEXT
}

for word in "$@"; do
    case "$word" in -h | --help) usage && exit 0 ;; esac
done
if [ $# -eq 0 ]; then
    usage >&2
    exit 2
fi

python=${PYTHON:-python3}
[ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ] && python=.venv/bin/python

# One thread per process and no spinning; large receive buffers come from the heap instead of fresh pages.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0
export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1

# Checks the config before anything starts, then reads what this script needs of it.
"$python" -m asyncrl config "$@" > /dev/null || exit 2
settings=$("$python" - "$@" <<'PY'
import sys

from asyncrl.config import load_config

words = sys.argv[1:]
c = load_config([w for w in words if "=" not in w], [w for w in words if "=" in w])
print(c.run_dir, c.generator.count, int(c.run.start_timeout_s), int(c.run.shutdown_s), sep="\n")
PY
) || exit 2
{ read -r run_dir; read -r generators; read -r start_s; read -r shutdown_s; } <<< "$settings"

if [ -e "$run_dir/metrics.jsonl" ]; then
    echo "$run_dir holds a run already; choose another name with run.name=NAME" >&2
    exit 2
fi
mkdir -p "$run_dir/logs"
rm -f "$run_dir/replay.address" # an old one would lead to a replay that is gone

pids=()
started=
start() { # start NAME COMMAND...: runs it in the background with its own log, leaves its pid in $started
    local name=$1
    shift
    "$@" >> "$run_dir/logs/$name.log" 2>&1 &
    started=$!
    pids+=("$started")
    echo "started $name (pid $started, log $run_dir/logs/$name.log)"
}

running() { # running PID: true while that child of ours has not ended
    jobs -pr | grep -qx "$1"
}

stop_all() { # SIGTERM to what we started and still runs, SIGKILL to what is left after shutdown_s
    local pid deadline=$((SECONDS + shutdown_s))
    for pid in "${pids[@]}"; do
        running "$pid" && kill -TERM "$pid" 2> /dev/null
    done
    for pid in "${pids[@]}"; do
        while running "$pid" && [ $SECONDS -lt $deadline ]; do sleep 0.1; done
        running "$pid" && kill -KILL "$pid" 2> /dev/null
    done
    wait
}

signalled=0
trap 'signalled=2' INT
trap 'signalled=15' TERM
trap 'signalled=1' HUP
trap stop_all EXIT

finish() { # finish STATUS [MESSAGE]
    [ $# -gt 1 ] && echo "$2" >&2
    exit "$1" # the EXIT trap ends the rest
}

start replay "$python" -m asyncrl replay "$@"
replay=$started
deadline=$((SECONDS + start_s))
until [ -s "$run_dir/replay.address" ]; do
    [ "$signalled" -ne 0 ] && finish $((128 + signalled))
    running "$replay" || finish 1 "replay ended before it was ready; see $run_dir/logs/replay.log"
    [ $SECONDS -ge $deadline ] && finish 1 "replay was not ready within $start_s s; see $run_dir/logs/replay.log"
    sleep 0.1
done
echo "replay listens at $(cat "$run_dir/replay.address")"

fleet=()
for ((i = 0; i < generators; i++)); do
    start "g$i" "$python" -m asyncrl generate "$@" --id "g$i"
    fleet+=("$started")
done

start learner "$python" -m asyncrl learn "$@" # starts all its ranks
learner=$started

# Replay and the generators leave once the run is over; the learner may take a little longer to end.
grace_s=20
alone_since=
while running "$learner"; do
    [ "$signalled" -ne 0 ] && finish $((128 + signalled)) "stopped by signal $signalled"
    alive=0
    for pid in ${fleet[@]+"${fleet[@]}"}; do
        running "$pid" && alive=$((alive + 1))
    done
    missing=
    crashed=0
    for pid in "$replay" ${fleet[@]+"${fleet[@]}"}; do
        running "$pid" || wait "$pid" || crashed=1
    done
    running "$replay" || missing="replay ended before the learner; see $run_dir/logs/replay.log"
    [ "$generators" -gt 0 ] && [ "$alive" -eq 0 ] && missing=${missing:-"every generator ended; see $run_dir/logs/"}
    if [ -z "$missing" ]; then
        alone_since=
    else
        alone_since=${alone_since:-$SECONDS}
        if [ "$crashed" -eq 1 ] || [ $((SECONDS - alone_since)) -ge "$grace_s" ]; then
            finish 1 "$missing"
        fi
    fi
    sleep 0.2
done
[ "$signalled" -ne 0 ] && finish $((128 + signalled)) "stopped by signal $signalled"
wait "$learner"
status=$?
[ "$status" -ne 0 ] && finish "$status" "the learner ended with status $status; see $run_dir/logs/learner.log"
echo "finished: $run_dir (config.yaml, metrics.jsonl, tb/, logs/)"
finish 0
