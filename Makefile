# Two commands do everything on a fresh machine: `make run` and `make test`.
# Each creates .venv and installs what it needs, at the versions of constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: run serve test test-full test-browser test-cpus test-ranks mutants lint docs clean

run: $(INSTALLED)
	@$(BIN)/trueline witness --demo

serve: $(INSTALLED)
	@echo "Talk to it from another terminal: $(BIN)/trueline chat http://127.0.0.1:8000"
	@$(BIN)/trueline serve --port 8000

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n 2 -m "not slow"

test-full: lint
	HYPOTHESIS_PROFILE=full $(BIN)/pytest -n 2

# The chat page in the distribution's Chromium, or CHROMIUM=/path/to/one; test-full skips it without.
test-browser: $(INSTALLED)
	@$(BIN)/python tests/helpers/chromium.py
	$(BIN)/pytest -n 2 tests/browser

# The numeric tests under other instruction sets; CPUS="--only AVX2 --write" passes options on.
test-cpus: $(INSTALLED)
	$(BIN)/python tests/helpers/cpus.py $(CPUS)

# Ranks as real processes; RANKS="--size 2 8" runs some sizes, RANKS=--list prints the cases.
test-ranks: $(INSTALLED)
	PYTHONPATH=tests:tests/helpers $(BIN)/python tests/helpers/ranks_as_processes.py $(RANKS)

# Also: make mutants OPTIONS="--area text", --only ID, --changed main, --verify, --write-docs, --help
mutants: $(INSTALLED)
	PYTHONPATH=tests:tests/helpers $(BIN)/python -m mutants $(OPTIONS)

docs: $(INSTALLED)
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) tiny .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Trueline needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 3; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[dev]'
	@touch $@
