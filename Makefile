# Everything a developer does. The virtual environment is made on first use and touched again
# only when a dependency list changed.
PYTHON ?= python3
CONFIG ?= configs/local.yaml
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
SOURCES := services shared tools sdk/src tests

.PHONY: soak up test check fmt bench gpu-test compose-test setup
.DEFAULT_GOAL := up

up: $(READY)
	@exec $(BIN)/diptych up --die-with-parent $(CONFIG)

test: $(READY)
	@$(BIN)/diptych prepare
	$(BIN)/pytest -m "not gpu" -n 2 tests/unit tests/transport
	$(BIN)/pytest -m "not gpu" -n 2 --dist loadfile tests/system tests/faults

check: $(READY)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.ratchet

fmt: $(READY)
	$(BIN)/ruff check --fix-only $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: $(READY)
	@$(BIN)/diptych prepare $(CONFIG)
	$(BIN)/diptych bench serve --config $(CONFIG)

soak: $(READY)
	$(BIN)/python -m tests.unit.bulk_soak
	$(BIN)/python -m tests.unit.handover_soak
	$(BIN)/python -m tests.transport.connection_soak
	$(BIN)/python -m tests.faults.request_soak
	$(BIN)/python -m tests.faults.kill_soak

gpu-test: $(READY)
	@$(BIN)/python -m tools.gpu_test

compose-test: $(READY)
	$(BIN)/pytest tests/compose

setup: $(READY)

$(READY): pyproject.toml sdk/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Python 3.11 or newer is needed; name one with: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "error: Python's venv module is missing; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing dependencies into $(VENV); the first time this takes minutes and says nothing"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=26'
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet -c constraints.txt -e ./sdk -e '.[dev]'
	@touch $@
