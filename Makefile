# Two commands: `make run` serves the bundled model, `make test` passes every test. Python 3.11+ and the package index
# are all that they need; what they install stays in .venv.
#
#   make run ARGS="--model DIR"      serves a checkpoint; `make run ARGS=--help` lists what else can be said
#   make test ARGS="tests/unit -x"   a part of the tests
#   make bench ARGS=NAME             a benchmark; without a name, the list
#   make PYTHON=/path/to/python3.12  another interpreter
#   make PIP_FLAGS="…"               further flags of pip, e.g. --extra-index-url of PyTorch's CPU wheels

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
PIP_FLAGS ?=
# The first of these that runs and is new enough; evaluated only when an environment has to be made.
PYTHON ?= $(firstword $(foreach python,python3 python3.12 python3.11 python3.13 python3.14 python,$(shell \
	$(python) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $(python))))

.DEFAULT_GOAL := help
.PHONY: help run test lint format types proto proto-check docs docs-check bench clean

help:
	@sed -n 's/^#   //p' Makefile

run: $(VENV)/.run
	@$(BIN)/penstock serve $(ARGS)

# A process for each core and two more, because many tests wait for processes of their own. These find the modules that
# others have compiled, also where the environment says that such files are not wanted.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $$(($$($(BIN)/python -c 'import os; print(os.cpu_count() or 1)') + 2)) --dist worksteal $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(VENV)/.dev
	$(BIN)/mypy

proto: $(VENV)/.dev
	$(BIN)/python tools/generate_proto.py

proto-check: $(VENV)/.dev
	$(BIN)/python tools/generate_proto.py --check

docs: $(VENV)/.dev
	$(BIN)/python -m tools.generate_metrics
	$(BIN)/python -m tools.generate_parameters
	$(BIN)/python -m tools.generate_openapi
	$(BIN)/python -m tools.helm_values
	$(BIN)/python -m tools.boards

docs-check: $(VENV)/.dev
	$(BIN)/python -m tools.generate_metrics --check
	$(BIN)/python -m tools.generate_parameters --check
	$(BIN)/python -m tools.generate_openapi --check
	$(BIN)/python -m tools.helm_values --check
	$(BIN)/python -m tools.boards --check

bench: $(VENV)/.run
	$(BIN)/penstock bench $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache

# Stamps: an environment is made once, and again when what it is made of changes. .dev holds everything of .run.
$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[worker]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $(VENV)/.run $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Penstock needs Python 3.11 or newer: install it, or name it with make PYTHON=…" >&2; exit 1; }
	@echo "making $(VENV) with $(PYTHON); the first time takes a few minutes" >&2
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "this Python cannot make a virtual environment: on Debian and Ubuntu, install python3-venv" >&2; exit 1; }
