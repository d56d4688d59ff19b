#!/usr/bin/env bash
# One run on several hosts over plain ssh:
#   launch/ssh.sh --replay h0 --learner h0 --generators "h1 h2*4" CONFIG... [key=value...]
#   launch/ssh.sh --hosts FILE CONFIG... [key=value...]
# Every host needs this folder (or --dir) with its .venv and the model. docs/fleets.md says the rest; -h lists options.
# The exit status is the learner's, 1 when the run cannot go on, 2 when the config is refused, 128 + n after signal n.
set -euo pipefail
python=${PYTHON:-python3}
[ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ] && python=.venv/bin/python
export ASYNCRL_PROG=launch/ssh.sh
exec "$python" -m asyncrl.remote "$@"
