# Two commands matter: `make quickstart` and `make test`. Both need python3 (3.11 or newer), make and pip, and make
# everything else themselves in .venv. `make help` lists the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
PYTEST_ARGS ?=

# One thread per process and no spinning: with OpenMP's defaults several processes on few cores wait for each other
# in busy loops.
export OMP_NUM_THREADS := 1
export OMP_WAIT_POLICY := passive
export GOMP_SPINCOUNT := 0
export TOKENIZERS_PARALLELISM := false
# Models and data are local folders; nothing may ask a hub.
export HF_HUB_OFFLINE := 1

MODEL := models/quickstart
SMOLLM2 := models/smollm2_moe
RUNTIME := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
UPCYCLE := $(VENV)/.installed-upcycle
DEPS := pyproject.toml constraints.txt

# What `make test-fast` runs: the units without a model to train or to sample.
FAST = $(wildcard tests/algos tests/metrics tests/replay tests/tasks tests/transport tests/test_*.py)

# Two files of tests at a time, each file in one process: many tests wait for something. TEST_JOBS=0: all in one process.
TEST_JOBS ?= 2
SIDE_BY_SIDE = -n $(TEST_JOBS) --dist loadfile --max-worker-restart 0

# Debian packages of `make test-system`; .ci/run installs them.
SYSTEM_PACKAGES := openssh-server openssh-client iproute2 slurm-wlm munge chromium fonts-dejavu-core

.PHONY: help quickstart model smollm2 test test-fast test-sglang test-system test-long check format docs clean
.DELETE_ON_ERROR:

help:
	@echo "make quickstart  install, build the small model once, train it asynchronously on this CPU"
	@echo "make smollm2     download a small chat model (93 MB) and make a Mixture of Experts of it (docs/smollm2.md)"
	@echo "make test        install and run all tests but those of the next targets, whole runs among them"
	@echo "make test-fast   the quick part of the tests"
	@echo "make test-sglang against a real SGLang server on this CPU; installs it first, outside the repository (1.6 GB)"
	@echo "make test-system fleets over a real ssh and a real SLURM, the dashboard in Chromium; as root, with $(SYSTEM_PACKAGES)"
	@echo "make test-long   tests/long (every model family, a real language model), chaos (10 minutes), soak (20), fuzz (5)"
	@echo "make check       ruff, format and types, as CI runs them"
	@echo "make format      rewrite the code in the house format"
	@echo "make docs        write the generated pages of docs/ again"
	@echo "make clean       remove .venv, caches, runs and the built model"

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "asyncrl needs Python 3.11 or newer; set PYTHON=python3.x"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(RUNTIME): $(DEPS) | $(PY)
	$(BIN)/pip install --quiet --disable-pip-version-check -e . -c constraints.txt
	@touch $@

$(DEV): $(DEPS) | $(PY)
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[dev]" -c constraints.txt
	@touch $(RUNTIME) $@

$(UPCYCLE): $(DEPS) | $(PY)
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[upcycle]" -c constraints.txt
	@touch $(RUNTIME) $@

$(MODEL)/model.safetensors: tools/make_quickstart_model.py tools/warm_start.py tools/demonstrations.py configs/quickstart.yaml | $(RUNTIME)
	$(PY) tools/make_quickstart_model.py $(MODEL)

model: $(MODEL)/model.safetensors

$(SMOLLM2)/model.safetensors: tools/upcycle.py tools/upcycling.py tools/smollm2.py | $(UPCYCLE)
	$(PY) tools/upcycle.py $(SMOLLM2)

smollm2: $(SMOLLM2)/model.safetensors

quickstart: $(RUNTIME) model
	$(BIN)/asyncrl run configs/quickstart.yaml

test: $(DEV)
	$(PY) -m pytest $(SIDE_BY_SIDE) -m "not long" --ignore=tests/fleet --ignore=tests/browser --ignore=tests/long --ignore=tests/sglang \
		$(PYTEST_ARGS)

test-fast: $(DEV)
	$(PY) -m pytest $(SIDE_BY_SIDE) -m "not long" $(FAST) $(PYTEST_ARGS)

# The server has an environment of its own, for SGLang pins other versions; it is made once and serves every checkout.
test-sglang: $(DEV) model
	PYTHON=$(PYTHON) tools/sglang_cpu/install
	$(PY) -m pytest tests/sglang -m "not long" $(PYTEST_ARGS)

# A test here that lacks its packages is skipped with their names.
test-system: $(DEV)
	$(PY) -m pytest tests/fleet tests/browser $(PYTEST_ARGS)

# Each prints what it found and fails when something does not hold.
SEED ?= 1
test-long: $(DEV) $(UPCYCLE) model
	$(PY) -m pytest tests/long $(PYTEST_ARGS)
	PYTHON=$(PYTHON) tools/sglang_cpu/install
	$(PY) -m pytest -m long --ignore=tests/fleet --ignore=tests/long $(PYTEST_ARGS)
	$(PY) tools/chaos.py --minutes 10 --seed $(SEED)
	$(PY) tools/soak.py --minutes 20
	$(PY) tools/fuzz.py --minutes 5 --seed $(SEED)

check: $(DEV)
	tools/check

format: $(DEV)
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

docs: $(RUNTIME)
	$(PY) tools/config_reference.py docs/config.md
	$(PY) tools/metrics_reference.py docs/metrics.md
	$(PY) tools/models_reference.py docs/models.md

clean:
	rm -rf $(VENV) models runs reports build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
