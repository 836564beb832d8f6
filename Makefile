# The same few commands run locally and in CI. A bare clone with Python 3.12, pip and make is enough:
# every target that needs the environment builds it first, once, and again when the pins change.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INTERPRETER = $(BIN)/python -c 'import sys; raise SystemExit(sys.version_info[:2] != (3, 12))'
UV = $(BIN)/uv pip
PYTEST_ARGS ?=
# The whole suite runs whole files side by side, in as many processes as there are cores, four at most; what is named
# under tests/ runs in one.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores : 4)))
SPREAD = $(if $(findstring tests/,$(PYTEST_ARGS)),,-n $(WORKERS) --dist loadfile)

.PHONY: help install demo test lint format types wheel smoke bench lock docs hooks clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

install: $(STAMP) ## build .venv from the lock file, this project editable in it

demo: $(STAMP) ## score the example request with the demo model, on the CPU
	@$(BIN)/python examples/demo.py

# Hundreds of processes load the same modules: keep what the first of them compiles, whatever the environment says.
test: $(STAMP) ## the whole test suite
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(SPREAD) $(PYTEST_ARGS)

lint: $(STAMP) ## ruff, shell scripts, Dockerfile, compose file
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/shellcheck .ci/run .ci/smoke
	@$(BIN)/hadolint --config docker/hadolint.yaml docker/Dockerfile
	@$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker/compose.yaml

format: $(STAMP) ## let ruff fix what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(STAMP) ## mypy, strict
	@$(BIN)/mypy

wheel: $(STAMP) ## build the wheel into dist/
	@rm -rf build dist
	@$(BIN)/python -m build --wheel --no-isolation --outdir dist .

smoke: wheel ## install the wheel in a clean environment and serve from a foreign folder
	@.ci/smoke dist/*.whl

bench: $(STAMP) ## print the speed figures on this CPU (never part of the tests)
	@$(BIN)/python -m benchmarks.cpu_speed

lock: $(STAMP) ## pin every dependency again, with hashes and without an index address
	@$(BIN)/uv pip compile pyproject.toml --extra server --extra demo --extra calibrate --group dev --universal --python-version 3.12 \
	  --generate-hashes --no-emit-index-url --no-header --quiet --output-file requirements.lock

docs: $(STAMP) ## write the generated tables of docs/ again
	@$(BIN)/python docs/update.py

hooks: $(STAMP) ## run the linters before each commit
	@$(BIN)/pre-commit install

clean: ## remove what the targets built (the environment and the model cache stay)
	@rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info

# `--without-pip` and `pip --python`: no ensurepip is needed, and a machine's own pip settings (which may cap versions)
# only ever install uv. uv's pin is the lock file's own, hashes included. Packages are compiled here, once: where the
# environment forbids interpreters to keep what they compile, each of the tests' hundreds would compile them again.
$(STAMP): pyproject.toml requirements.lock
	@python=""; for name in $${PYTHON:-} python3.12 python3 python; do \
	  if $$name -c 'import sys; raise SystemExit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then python=$$name; break; fi; \
	done; \
	[ -n "$$python" ] || { echo "Python 3.12 was not found: put python3.12 on the path, or run: make PYTHON=/path/to/python3.12" >&2; exit 1; }; \
	echo "[1/3] environment in $(VENV) ($$($$python --version))"; \
	$(INTERPRETER) 2>/dev/null || $$python -m venv --clear --without-pip $(VENV); \
	sed -n '/^uv==/,/^    #/p' requirements.lock > $(VENV)/uv.txt; \
	$$python -m pip --python $(BIN)/python install --quiet --no-deps --require-hashes --requirement $(VENV)/uv.txt
	@echo "[2/3] packages from requirements.lock: torch with its CUDA libraries is large, about 5 GB on disk"
	@$(UV) install --python $(BIN)/python --compile-bytecode --require-hashes --requirement requirements.lock
	@echo "[3/3] spinf-serve itself"
	@$(UV) install --python $(BIN)/python --quiet --no-deps --no-build-isolation --editable .
	@touch $@
