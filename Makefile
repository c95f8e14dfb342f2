# `make serve` and `make test` each do all of their own set-up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Set up to serve, and to test as well.
SERVES := $(VENV)/.serves
STAMP := $(VENV)/.installed

comma := ,
CONFIG ?= examples/demo.toml
SEEDS ?= 20000
SECONDS ?= 600
# torch is not in requirements.txt: its build for CPUs has hashes of its own.
# The CPU build of torch is a tenth of the CUDA build that Linux gets by default.
TORCH_INDEX ?= $(if $(filter Linux,$(shell uname -s)),$(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu))
PIP := $(BIN)/pip --disable-pip-version-check
PIP_INSTALL := $(PIP) install --constraint constraints.txt

.PHONY: hashes sbom wheel serve test slow long real machines check reliability sanitize kernels fuzz signatures newest conformance simulate snippets docs format demo-model clean

serve: $(SERVES)  ## install what serving needs, then serve the demo model on 127.0.0.1:8000; CONFIG=FILE.toml ARGS="--port 8001"
	$(BIN)/callboard serve $(CONFIG) $(ARGS)

# Three workers for two cores: one of them mostly waits.  Hundreds of processes import the same modules, and pytest rewrites
# each test's: compiled once, whatever a container sets.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=30

test: $(STAMP)  ## install, then check the code and run every test but the slow ones
	$(MAKE) check
	$(PYTEST) -m "not slow and not long"

slow: $(STAMP)  ## the tests that start processes or a browser, kill, build or compile; CI runs them too
	$(PYTEST) -m "slow and not long"

long: $(STAMP)  ## before a release: more cases of what the tests of CI show as well
	$(PYTEST) -m long

real: $(STAMP)  ## fetch a real model of 98 MB and seven published tokenizers, pinned by hashes, into the user's cache, and run the tests that need them
	$(BIN)/python -m tests.real
	$(PYTEST) tests/real

machines: $(STAMP)  ## every test as other machines would run it: other kernels of BLAS and torch, no compiler, no home; ROWS="haswell no-home"
	$(BIN)/python -m tests.machines $(ROWS)

check: $(STAMP)  ## lint, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

RELIABILITY := benchmarks/results/reliability_2core_cpu.json
reliability: $(STAMP)  ## the tests of docs/reliability.md alone, one by one, with what each of them measured
	$(BIN)/python -m pytest -m reliability --reliability=$(RELIABILITY)

sanitize: $(STAMP)  ## random calls of the kernels in C under ASan and UBSan, for two minutes; ARGS="--seconds 3600 --seed 7"
	$(BIN)/python -m tests.sanitized $(ARGS)

kernels: $(STAMP)  ## the kernels in C for CPUs that this machine is not: a cross compiler and qemu-user for ARM, plain C for AVX-VNNI, AVX512_BF16 and AMX
	$(BIN)/python -m pytest -rs tests/kernels/test_levels.py tests/kernels/test_driver.py

fuzz: $(STAMP)  ## foreign bytes that are made to reach new code, against all that reads them; SECONDS=600 ARGS="--only uploads"
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) --folder $(VENV)/fuzz $(ARGS)

signatures: $(STAMP)  ## every call into FlashInfer against its own Python code, 62 MB, which needs no GPU to be imported
	@if $(BIN)/pip install --quiet --disable-pip-version-check --upgrade --no-compile --target $(VENV)/signatures --no-deps \
		flashinfer-python==0.7.2.post1 apache-tvm-ffi==0.1.15.post2 nvidia-ml-py einops tabulate \
		requests certifi charset-normalizer urllib3; \
	then PYTHONPATH=$(VENV)/signatures $(BIN)/python -m pytest \
		tests/attention/test_flashinfer_signatures.py tests/attention/test_flashinfer_package.py; \
	else echo "signatures: FlashInfer cannot be installed here; skipped"; fi

NEWEST := tests/layers tests/sampling tests/execution tests/formats
newest: $(STAMP)  ## tests of what calls torch, with the newest torch and transformers beside the environment; CUDA's build has 5 GB
	$(PIP) install --quiet --upgrade --no-compile --target $(VENV)/newest \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "torch<3" "transformers<6"
	PYTHONPATH=$(VENV)/newest $(BIN)/python -m pytest -n 2 --dist loadfile $(NEWEST)

conformance: $(STAMP)  ## client libraries of PyPI and npm, 1 GB beside the environment, against a live server; ONLY=name
	$(BIN)/python -m tests.clients --folder $(VENV)/clients --only "$(ONLY)"

simulate: $(STAMP)  ## run the deterministic simulation until SEEDS seeds counted, on all cores
	$(BIN)/python -m tests.sim sweep --seeds $(SEEDS)

snippets: $(STAMP)  ## run the commands and programs of README and the quick start, and compare what they print
	$(BIN)/python -m tests.snippets

WHEEL := HATCH_BUILD_HOOK_ENABLE_CUSTOM=true $(BIN)/python -m hatchling build --target wheel --directory dist
CROSS := aarch64-linux-gnu-gcc
wheel: $(SERVES)  ## wheels in dist/ with the kernels compiled for each kind of CPU: of this machine, and of ARM with a cross compiler
	$(WHEEL)
	@if command -v $(CROSS) >/dev/null; then CC=$(CROSS) CALLBOARD_MACHINE=aarch64 $(WHEEL); \
	else echo "wheel: no $(CROSS), so there is none for ARM (apt-get install gcc-aarch64-linux-gnu)"; fi

docs: $(SERVES)  ## build the documentation as a site in site/, with links checked
	@$(PIP) install --quiet --upgrade --no-compile --target $(VENV)/docs "mkdocs-material>=9.6,<10" "mkdocs<2"
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=$(VENV)/docs $(BIN)/python -m mkdocs build --strict

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

hashes: $(STAMP)  ## write requirements.txt, the hashes of what serving needs; INDEX=URL of a package index with PEP 691's JSON
	$(BIN)/python -m tests.hashes $(INDEX)

sbom: $(STAMP)  ## write sbom.json (CycloneDX): every package that serving needs here, with its version, license and hashes
	$(BIN)/python -m tests.sbom

demo-model: $(STAMP)  ## train the demo model again: Python, then conversations (two hours on two cores)
	$(BIN)/python examples/demo_model/train.py
	OMP_NUM_THREADS=1 $(BIN)/python examples/demo_model/teach.py

$(SERVES): pyproject.toml constraints.txt requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "callboard needs Python 3.11 or later, this is " + sys.version.split()[0])'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "Python's venv module is missing: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "1 of 3: what callboard imports, each file with its hash"
	$(PIP) install --require-hashes --only-binary :all: --requirement requirements.txt
	@echo "2 of 3: torch, $(if $(TORCH_INDEX),the CPU build,the build of the package index; on Linux the one for CUDA$(comma) several GB)"
	$(PIP_INSTALL) --retries 2 $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	@echo "3 of 3: callboard"
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $(SERVES)

$(STAMP): $(SERVES)
	$(PIP_INSTALL) --quiet --editable ".[dev]"
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
