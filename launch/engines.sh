#!/usr/bin/env bash
# M generators on this host for a run whose replay and learner are elsewhere, each with an SGLang server of its own
# (generator.engine=sglang), or with the embedded engine:
#   launch/engines.sh 4 CONFIG... replay.connect=tcp://h0:5555 [key=value...]
# Servers get different ports and GPUs (generator.sglang.port, gpus, first_gpu). A generator that ends takes its server
# with it and is started again, later each time, run.max_generator_restarts times.
set -uo pipefail

usage() {
    cat << 'TEXT'
usage: launch/engines.sh COUNT CONFIG... [key=value...]

Starts COUNT generators here and starts again what ends before the run is over. They join the run that
replay.connect names, or the one in the run folder of the config where this host shares it.

NAME=PREFIX     their ids: PREFIX0, PREFIX1, ...; default: the host's short name and -g
LOGS=FOLDER     default: logs of the run folder
PYTHON=COMMAND  default: .venv/bin/python if there is one, else python3
The exit status is 0 when the run is over, 1 when every generator failed for good, 2 when the config is refused,
128 + n after signal n.
TEXT
}

for word in "$@"; do
    case "$word" in -h | --help) usage && exit 0 ;; esac
done
count=${1:-}
if [ $# -lt 2 ] || ! [[ "$count" =~ ^[1-9][0-9]{0,3}$ ]]; then
    usage >&2
    exit 2
fi
shift
words=("$@")

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" # $python and what every role is started with

"$python" -m asyncrl config "${words[@]}" > /dev/null || exit 2
settings=$("$python" - "${words[@]}" <<'PY'
import sys

from asyncrl.config import load_config

words = sys.argv[1:]
c = load_config([w for w in words if "=" not in w], [w for w in words if "=" in w])
print(c.run_dir, int(c.run.shutdown_s), c.run.max_generator_restarts, len(c.generator.sglang.urls), sep="\n")
PY
) || exit 2
{ read -r run_dir; read -r shutdown_s; read -r restarts; read -r urls; } <<< "$settings"
if [ "$urls" -gt 0 ] && [ "$urls" -lt "$count" ]; then
    echo "generator.sglang.urls has $urls servers for $count generators: each needs one of its own, of this host" >&2
    exit 2
fi
logs=${LOGS:-$run_dir/logs}
prefix=${NAME:-$(hostname -s)-g}
mkdir -p "$logs"

# By number: process, restarts left, when it began and when to start it again (seconds), the next wait, its last status.
declare -A pid=() left=() began=() due=() delay=() status=()
start() { # start I
    ASYNCRL_LOCAL_INDEX=$1 "$python" -m asyncrl generate "${words[@]}" --id "$prefix$1" >> "$logs/$prefix$1.log" 2>&1 &
    pid[$1]=$!
    began[$1]=$SECONDS
    echo "started $prefix$1 (pid $!, log $logs/$prefix$1.log)"
}

running() { # running I; a builtin, since Ctrl-C would end a pipeline here
    [ -n "${pid[$1]:-}" ] && kill -0 "${pid[$1]}" 2> /dev/null
}

look() { # look I: note how it ended, and start it again when it is time
    local ended
    [ -n "${status[$1]:-}" ] && return
    if [ -n "${due[$1]:-}" ]; then
        [ "$over" -eq 1 ] && status[$1]=0 && return # nobody needs it any more
        [ $SECONDS -ge "${due[$1]}" ] && unset "due[$1]" && start "$1"
        return
    fi
    running "$1" && return
    wait "${pid[$1]}"
    ended=$?
    if [ "$ended" -eq 0 ] || [ "$ended" -eq 2 ] || [ "${left[$1]}" -eq 0 ] || [ "$signalled" -ne 0 ]; then
        status[$1]=$ended
        [ "$ended" -eq 0 ] && over=1 # replay said so
        [ "$ended" -ne 0 ] && echo "$prefix$1 ended with status $ended; set aside" >&2
        return
    fi
    left[$1]=$((left[$1] - 1))
    [ $((SECONDS - began[$1])) -gt 60 ] && delay[$1]=0 # it worked for a while: begin with short waits again
    due[$1]=$((SECONDS + delay[$1]))
    echo "$prefix$1 ended with status $ended; started again in ${delay[$1]} s" >&2
    delay[$1]=$((delay[$1] * 2 + 1 > 30 ? 30 : delay[$1] * 2 + 1))
}

stop_all() { # SIGTERM, then SIGKILL to what is left after run.shutdown_s
    local i deadline=$((SECONDS + shutdown_s + 2))
    for i in "${!pid[@]}"; do running "$i" && kill -TERM "${pid[$i]}" 2> /dev/null; done
    for i in "${!pid[@]}"; do
        while running "$i" && [ $SECONDS -lt $deadline ]; do sleep 0.1; done
        running "$i" && kill -KILL "${pid[$i]}" 2> /dev/null
    done
    wait
}

signalled=0
over=0
trap 'signalled=2' INT
trap 'signalled=15' TERM
trap 'signalled=1' HUP
trap stop_all EXIT

for ((i = 0; i < count; i++)); do
    left[$i]=$restarts
    delay[$i]=1
    start "$i"
done
while [ ${#status[@]} -lt "$count" ]; do
    [ "$signalled" -ne 0 ] && { echo "stopped by signal $signalled" >&2; exit $((128 + signalled)); }
    for ((i = 0; i < count; i++)); do look "$i"; done
    sleep 0.2
done
code=1
for i in "${!status[@]}"; do
    [ "${status[$i]}" -eq 0 ] && exit 0
    [ "${status[$i]}" -eq 2 ] && code=2
done
exit "$code"
