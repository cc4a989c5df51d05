# The commands that the project keeps. Each sets up what it needs: a fresh Debian machine with Python 3.11 is enough.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup run serve test check format bench mutants nightly lock clean

help: ## Show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

setup: $(STAMP) ## Make the virtual environment (done by the others as needed)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Poseidon needs Python 3.11 or newer; set PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "the venv module is missing: apt-get install python3-venv" >&2; exit 1; }
	@echo "installing into $(VENV) …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

run: $(STAMP) ## Start Poseidon, run a first program in it, show what each step took, stop
	@$(BIN)/python -m poseidon.cli.demo

serve: $(STAMP) ## Start Poseidon and keep it running (Ctrl-C stops it)
	@$(BIN)/poseidon serve

test: $(STAMP) ## All tests, in random order, by WORKERS=2 processes, with a coverage report
	@$(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=worksteal --cov --cov-report=term:skip-covered --durations=10 $(PYTEST_ARGS)

check: $(STAMP) ## Format, lint, types, import layers, migrations
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/flake8 --select=ASYNC101,ASYNC102,ASYNC103,ASYNC113,ASYNC119,ASYNC120 poseidon tests bench
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python -m pytest -q -p no:randomly --no-header tests/store/test_migrations.py

format: $(STAMP) ## Format the code and mend what can be mended
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

bench: $(STAMP) ## Measure; prints each figure beside its bare reference, and writes bench/results/latest.json
	@$(BIN)/python -m bench

mutants: $(STAMP) ## Plant known faults in the core; each must be caught by a test
	@$(BIN)/python -m tests.mutants $(MUTANTS_ARGS)

nightly: $(STAMP) ## The long property tests, thousands of generated requests, and 200 rounds of chaos in a cluster
	@POSEIDON_TEST_CHAOS_ROUNDS=200 POSEIDON_TEST_FUZZ_EXAMPLES=500 $(BIN)/python -m pytest tests/core tests/nomad/test_chaos.py tests/api/test_fuzzed.py tests/api/test_websocket_fuzz.py tests/acceptance/test_quoting.py --hypothesis-profile=nightly $(PYTEST_ARGS)

lock: ## Resolve the development dependencies anew
	@$(BIN)/python -m pip install --quiet uv
	@$(BIN)/uv pip compile --universal --python-version 3.11 --extra dev --generate-hashes --no-emit-index-url --quiet -o requirements.lock pyproject.toml

clean: ## Remove the virtual environment and all caches
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist bench/results
