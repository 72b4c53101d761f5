# Everything a developer runs. `make` alone lists it; every target sets up what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The version is written once, in pyproject.toml.
TORCH := $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
MODEL := smollm2-135m
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet
PYTEST_ARGS ?=
# Two files at a time, each with servers of its own: most tests wait for a server or a lease. In
# their order, which has the long ones first.
PARALLEL ?= -n 2 --dist loadfile --no-loadscope-reorder
MINUTES ?= 10
SCALE ?= 1
CHAOS_ARGS ?=
MUTANT_ARGS ?=
BENCH_ARGS ?=
PEER_ARGS ?=

# Tiny models on few cores: a second OpenMP thread only makes the others wait. No test may download.
# Compiled modules are kept, whatever the shell says: a run starts hundreds of Python processes.
TEST_ENV := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup model kernels demo test test-redis test-gpu test-long equivalence chaos mutants check format bench bench-peers bench-gpu bench-report clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(STAMP) ## make .venv with everything a developer needs

# Torch goes first, alone and at one version, so that the second install finds it in place and
# leaves it alone, whichever build of it this machine's pip prefers.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Headrace needs Python 3.11 or newer: make PYTHON=python3.11 setup")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) '$(TORCH)'
	$(PIP_INSTALL) --editable '.[cli,worker,dev]'
	@touch $@

model: $(STAMP) ## fetch the demo model, SmolLM2-135M-Instruct, unless it is there
	$(BIN)/headrace pull $(MODEL)

kernels: $(STAMP) ## build the C++ kernels for this CPU, unless they are ready
	$(BIN)/python -m headrace_worker.kernels

demo: model kernels ## answer examples/prompts.jsonl with the demo model on this machine
	$(BIN)/headrace demo

# The kernels are built first, so that no test's deadline has to stand a compiler.
test: model kernels ## run every test that this machine can run
	$(TEST_ENV) $(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

test-redis: model ## run the tests that need a server, on Valkey and on an installed redis-server
	@command -v redis-server >/dev/null || { echo 'install redis-server first'; exit 1; }
	$(TEST_ENV) $(BIN)/python -m pytest tests/fundamentals tests/contract tests/integration tests/chaos $(PYTEST_ARGS)

equivalence: $(STAMP) ## print model family × option: ids compared, identical, near-ties, differences
	$(TEST_ENV) $(BIN)/python -m tests.equivalence.report

test-gpu: $(STAMP) ## check attention, kernels and tokens on the GPU of this machine
	$(BIN)/python -m benchmarks.gpu --only attention,rows,tokens --output build/bench/gpu-test.json

test-long: model ## schedules for MINUTES (10), whole matrix, SmolLM2; LONG_ARGS="--part schedules"
	$(TEST_ENV) $(BIN)/python -m tests.equivalence.long --minutes $(MINUTES) $(LONG_ARGS)

chaos: model ## run the fault matrix at SCALE (1) of its full size; CHAOS_ARGS="--only F --seed N"
	$(TEST_ENV) PYTHONPATH=tests $(BIN)/python -m support.chaos_run --scale $(SCALE) $(CHAOS_ARGS)

mutants: $(STAMP) ## plant faults in a copy of the source, see each caught; MUTANT_ARGS="--only window"
	$(TEST_ENV) PYTHONPATH=tests $(BIN)/python -m mutations.check $(MUTANT_ARGS)

check: $(STAMP) ## format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite files as `check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: model ## measure all of it, 20 minutes on an idle machine; BENCH_ARGS="--quick" for 3
	$(BIN)/python -m benchmarks.bench $(BENCH_ARGS)

bench-peers: model ## measure against vLLM, OpenVINO and transformers; installs them first
	$(BIN)/python -m benchmarks.compare $(PEER_ARGS)

bench-gpu: $(STAMP) ## check and measure the GPU of this machine, under 4 minutes; GPU_ARGS="--only limits,decode"
	$(BIN)/python -m benchmarks.gpu $(GPU_ARGS)

bench-report: $(STAMP) ## write what was measured into docs/performance.md, and draw the plots
	$(BIN)/python -m benchmarks.report

clean: ## remove .venv and everything the tools made
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
