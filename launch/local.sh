#!/usr/bin/env bash
# What `asyncrl run` does, by hand: replay, the generators and the learner of one run on this machine.
# Every role is an ordinary command, so copy a line from here to start one elsewhere.
# Of the restart rules of `asyncrl run` it keeps the plain part: what is killed is started again a second later. It does
# not wait longer each time, starts no role again that ended with an error, and does not read logs for a learner's own
# error behind the kill of a rank.
set -uo pipefail

usage() {
    cat << 'TEXT'
usage: launch/local.sh CONFIG... [key=value...]

Starts replay, the generators and the learner of one run on this machine, for example
    launch/local.sh configs/quickstart.yaml configs/methods/tis.yaml run.name=tis
Files merge from left to right: the run config first, a method or regime after it.
What is killed is started again, as often as run.max_*_restarts say.

PYTHON=COMMAND chooses the Python; default: .venv/bin/python if there is one, else python3.
The exit status is the learner's, or 1 when replay or the last generator ends for good before it, 2 when the config
is refused, 128 + n after signal n.
TEXT
}

for word in "$@"; do
    case "$word" in -h | --help) usage && exit 0 ;; esac
done
if [ $# -eq 0 ]; then
    usage >&2
    exit 2
fi

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" # $python and what every role is started with

# Checks the config before anything starts, then reads what this script needs of it.
"$python" -m asyncrl config "$@" > /dev/null || exit 2
settings=$("$python" - "$@" <<'PY'
import sys

from asyncrl.config import load_config

words = sys.argv[1:]
c = load_config([w for w in words if "=" not in w], [w for w in words if "=" in w])
r = c.run
print(c.run_dir, c.generator.count, int(r.start_timeout_s), int(r.shutdown_s), sep="\n")
print(r.max_replay_restarts, r.max_generator_restarts, r.max_learner_restarts, sep="\n")
PY
) || exit 2
declare -A left # how often a role may still be started again, by its name
{
    read -r run_dir; read -r generators; read -r start_s; read -r shutdown_s
    read -r left[replay]; read -r each; read -r left[learner]
} <<< "$settings"
for ((i = 0; i < generators; i++)); do left[g$i]=$each; done

if [ -e "$run_dir/metrics.jsonl" ]; then
    echo "$run_dir holds a run already; choose another name with run.name=NAME" >&2
    exit 2
fi
mkdir -p "$run_dir/logs"
rm -f "$run_dir/replay.address" # an old one would lead to a replay that is gone

words=("$@")
declare -A pid status # by name: its process, and its exit status once it has ended for good
start() { # start NAME: that role in the background, with its own log
    case "$1" in
        replay) set -- "$1" replay "${words[@]}" ;;
        learner) set -- "$1" learn "${words[@]}" ;; # starts all its ranks
        *) set -- "$1" generate "${words[@]}" --id "$1" ;;
    esac
    local name=$1
    "$python" -m asyncrl "${@:2}" >> "$run_dir/logs/$name.log" 2>&1 &
    pid[$name]=$!
    echo "started $name (pid $!, log $run_dir/logs/$name.log)"
}

running() { # running NAME: true while its process has not ended; the shell reaps what has ended at once
    # A builtin: an interrupt from the terminal would end a pipeline here, which reads as "not running".
    kill -0 "${pid[$1]}" 2> /dev/null
}

look() { # look NAME: starts it again when it was killed; else notes its status once it has ended
    local ended
    { [ -n "${status[$1]:-}" ] || running "$1"; } && return
    wait "${pid[$1]}"
    ended=$?
    if [ "$ended" -le 128 ] || [ "${left[$1]}" -eq 0 ] || [ "$signalled" -ne 0 ]; then
        status[$1]=$ended
        return
    fi
    left[$1]=$((left[$1] - 1))
    echo "$1 ended with status $ended; started again" >&2
    start "$1"
    sleep 1 # what is killed again and again does not use up all its restarts at once
}

stop_all() { # SIGTERM to what still runs, SIGKILL to what is left after shutdown_s; see finish_learner
    local name deadline=$((SECONDS + shutdown_s))
    finish_learner "$deadline"
    for name in "${!pid[@]}"; do
        running "$name" && kill -TERM "${pid[$name]}" 2> /dev/null
    done
    for name in "${!pid[@]}"; do
        while running "$name" && [ $SECONDS -lt $((deadline + 2)) ]; do sleep 0.1; done
        running "$name" && kill -KILL "${pid[$name]}" 2> /dev/null
    done
    wait
}

finish_learner() { # finish_learner DEADLINE: it commits and saves its last update, for which replay must still be there
    [ -n "${pid[learner]:-}" ] && running learner || return
    kill -TERM "${pid[learner]}" 2> /dev/null
    while running learner && [ $SECONDS -lt "$1" ]; do sleep 0.1; done
    running learner && kill -KILL "${pid[learner]}" 2> /dev/null
}

signalled=0
trap 'signalled=2' INT
trap 'signalled=15' TERM
trap 'signalled=1' HUP
trap stop_all EXIT

finish() { # finish STATUS [MESSAGE [NAME]]: NAME is the role whose log has the cause
    [ $# -gt 1 ] && echo "$2" >&2
    [ $# -gt 2 ] && grep -h ' ERROR asyncrl: ' "$run_dir/logs/$3.log" | tail -n 1 >&2
    exit "$1" # the EXIT trap ends the rest
}

start replay
deadline=$((SECONDS + start_s))
until [ -s "$run_dir/replay.address" ]; do
    [ "$signalled" -ne 0 ] && finish $((128 + signalled))
    look replay
    [ -n "${status[replay]:-}" ] && finish 1 "replay ended before it was ready; see $run_dir/logs/replay.log"
    [ $SECONDS -ge $deadline ] && finish 1 "replay was not ready within $start_s s; see $run_dir/logs/replay.log"
    sleep 0.1
done
echo "replay listens at $(cat "$run_dir/replay.address")"

fleet=()
for ((i = 0; i < generators; i++)); do
    start "g$i"
    fleet+=("g$i")
done
start learner

# Replay and the generators leave once the run is over; the learner may take a little longer to end.
grace_s=20
alone_since=
while [ -z "${status[learner]:-}" ]; do
    [ "$signalled" -ne 0 ] && finish $((128 + signalled)) "stopped by signal $signalled"
    alive=0
    crashed=0
    missing=
    culprit=replay
    for name in learner replay ${fleet[@]+"${fleet[@]}"}; do
        look "$name"
        [ "$name" = learner ] && continue
        [ -z "${status[$name]:-}" ] && alive=$((alive + 1)) || [ "${status[$name]}" -eq 0 ] || { crashed=1; culprit=$name; }
    done
    [ -n "${status[replay]:-}" ] && missing="replay ended before the learner; see $run_dir/logs/replay.log"
    [ -z "$missing" ] && [ "$generators" -gt 0 ] && [ "$alive" -eq 1 ] &&
        missing="every generator ended; see $run_dir/logs/"
    if [ -z "$missing" ]; then
        alone_since=
    else
        alone_since=${alone_since:-$SECONDS}
        if [ "$crashed" -eq 1 ] || [ $((SECONDS - alone_since)) -ge "$grace_s" ]; then
            [ -z "${status[learner]:-}" ] && finish 1 "$missing" "$culprit"
        fi
    fi
    sleep 0.2
done
[ "$signalled" -ne 0 ] && finish $((128 + signalled)) "stopped by signal $signalled"
code=${status[learner]}
[ "$code" -ne 0 ] && finish "$code" "the learner ended with status $code; see $run_dir/logs/learner.log" learner
echo "finished: $run_dir (config.yaml, metrics.jsonl, tb/, logs/)"
finish 0
