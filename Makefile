# `make serve` and `make test` each do all of their own set-up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: serve test check format demo-model clean

serve: $(STAMP)  ## install, then serve the demo model on 127.0.0.1:8000
	$(BIN)/callboard serve examples/demo.toml

test: $(STAMP)  ## install, then check the code and run every test
	$(MAKE) check
	$(BIN)/python -m pytest

check: $(STAMP)  ## lint, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo-model: $(STAMP)  ## train the demo model again (under an hour on two cores)
	$(BIN)/python examples/demo_model/train.py

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "callboard needs Python 3.11 or later, this is " + sys.version.split()[0])'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "Python's venv module is missing: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
