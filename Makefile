# `make serve` and `make test` each do all of their own set-up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

SEEDS ?= 20000

.PHONY: serve test check reliability signatures clients simulate format demo-model clean

serve: $(STAMP)  ## install, then serve the demo model on 127.0.0.1:8000
	$(BIN)/callboard serve examples/demo.toml

test: $(STAMP)  ## install, then check the code and run every test
	$(MAKE) check
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations=30

check: $(STAMP)  ## lint, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

RELIABILITY := benchmarks/results/reliability_2core_cpu.json
reliability: $(STAMP)  ## the tests of docs/reliability.md alone, one by one, with what each of them measured
	$(BIN)/python -m pytest -m reliability --reliability=$(RELIABILITY)

signatures: $(STAMP)  ## every call into FlashInfer against its own Python code, 62 MB, which needs no GPU to be imported
	@if $(BIN)/pip install --quiet --disable-pip-version-check --upgrade --no-compile --target $(VENV)/signatures --no-deps \
		flashinfer-python==0.7.2.post1 apache-tvm-ffi==0.1.15.post2 nvidia-ml-py einops tabulate \
		requests certifi charset-normalizer urllib3; \
	then PYTHONPATH=$(VENV)/signatures $(BIN)/python -m pytest \
		tests/attention/test_flashinfer_signatures.py tests/attention/test_flashinfer_package.py; \
	else echo "signatures: FlashInfer cannot be installed here; skipped"; fi

clients: $(STAMP)  ## client libraries that bring much with them, 180 MB beside the environment, against a live server
	@if $(BIN)/pip install --quiet --disable-pip-version-check --upgrade --no-compile --target $(VENV)/clients \
		--constraint constraints.txt langchain-openai litellm; \
	then PYTHONPATH=$(VENV)/clients $(BIN)/python -m pytest tests/clients; \
	else echo "clients: LangChain and LiteLLM cannot be installed here; skipped"; fi

simulate: $(STAMP)  ## run the deterministic simulation until SEEDS seeds counted, on all cores
	$(BIN)/python -m tests.sim sweep --seeds $(SEEDS)

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
