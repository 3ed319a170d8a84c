# Two commands do everything: `make serve` and `make test`. Both create what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Processes that run the tests; 0: this one alone. A file of tests stays in one process (tests/conftest.py).
TEST_PROCESSES ?= 3
READY := $(VENV)/.ready
DEV := $(VENV)/.dev

.PHONY: setup serve test tests test-kube test-vllm lint style types generate

setup: $(DEV)

# Serving needs the runtime only; the second start finds it there.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[serve]"
	-$(BIN)/python -c "import baton.engine.cpu.compiled_ops"  # compiled once, so that the first start is not the one that waits
	touch $@

$(DEV): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

serve: $(READY)
	@$(BIN)/baton up $(ARGS)

# Types are checked by one core, for minutes on a fresh checkout: beside the tests.
test: style
	$(MAKE) --jobs 2 types tests

tests: $(DEV)
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --no-loadscope-reorder

# Needs a Kubernetes cluster (tests/kube/run says how it is named); without one they are skipped.
test-kube: $(DEV)
	PYTHON=$(BIN)/python tests/kube/run

# With the CPU build of vLLM, in an environment of its own: its requirements and ours of development do not agree.
test-vllm:
	$(PYTHON) scripts/install_vllm.py .venv-vllm
	.venv-vllm/bin/python -m pytest -k vllm tests/engine/test_contract.py tests/engine/test_vllm.py tests/system/test_vllm.py

lint: style types

style: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/generate.py --check
	$(BIN)/python scripts/chart.py --check

types: $(DEV)
	$(BIN)/mypy

generate: $(DEV)
	$(BIN)/python scripts/generate.py
	$(BIN)/python scripts/chart.py
