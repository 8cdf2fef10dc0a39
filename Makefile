# Two commands do everything on a fresh machine: `make run` and `make test`.
# Each creates .venv and installs what it needs, at the versions of constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TINY := tiny/deepseek_v3

.PHONY: run test test-full lint docs clean

run: $(INSTALLED)
	@test -d $(TINY) || $(BIN)/trueline make-tiny deepseek_v3 $(TINY)
	@echo "A tiny model with random weights: right numbers, meaningless text."
	@$(BIN)/trueline generate $(TINY) --prompt "true to the" --prompt "a line" --max-tokens 24
	@echo; echo "What decides its numbers: trueline inspect $(TINY)"

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n 2 -m "not slow"

test-full: lint
	HYPOTHESIS_PROFILE=full $(BIN)/pytest -n 2

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
