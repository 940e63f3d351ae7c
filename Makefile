# Everything that is done to this repository, from a fresh clone on. `make help` lists it.
#
# The first target that needs it makes `.venv` and installs there; later runs reuse it until pyproject.toml or this
# file changes. Progress goes to the terminal; nothing outside the repository is written.

SHELL := bash
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH := 2.13.0
TORCH_INDEX ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := $(VENV)/constraints.txt
READY := $(VENV)/.ready
READY_DOCS := $(VENV)/.ready-docs

# No tool asks a registry for newer releases of itself, or advertises other tools.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export NO_MKDOCS_2_WARNING := 1

# One line per package instead of pip's full account; errors go to stderr in full.
pip = set -o pipefail; $(BIN)/python -m pip install --progress-bar off $(1) \
	| { grep --line-buffered -E '^(Processing|Collecting|Successfully)' || true; }

.PHONY: help
help: ## what can be made
	@sed -nE 's/^([a-z-]+):.*## (.*)$$/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'
	@echo
	@echo '  PYTHON=python3.12  the interpreter to make .venv from (3.11 or newer)'
	@echo '  TORCH_INDEX=URL    the wheel index to take torch $(TORCH) from, for a certain CPU or CUDA build'
	@echo '  ARGS="..."         passed on to the demo, to pytest, or to every benchmark'

.PHONY: demo
demo: $(READY) ## refit a real model between processes while it serves, and prove every bit
	$(BIN)/dcr-stream demo $(ARGS)

.PHONY: test
test: $(READY) ## the tests: core and frameworks, long matrices in their short form
	$(BIN)/pytest -m "not slow" $(ARGS)

.PHONY: test-core
test-core: $(READY) ## the tests that need no framework
	$(BIN)/pytest -m "not slow and not framework" $(ARGS)

.PHONY: test-all
test-all: $(READY) ## every test, long matrices in full
	$(BIN)/pytest -m "slow or not slow" $(ARGS)

.PHONY: check
check: $(READY) ## lint, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pyright

.PHONY: docs
docs: $(READY_DOCS) ## the documentation, into site/
	$(BIN)/mkdocs build --strict

.PHONY: bench
bench: $(READY) ## every benchmark (ARGS=--quick: the same figures in less time)
	@for file in bench/[a-z]*.py; do \
		name=$$(basename $$file .py); \
		echo "== bench.$$name"; \
		$(BIN)/python -m bench.$$name $(ARGS) || exit 1; \
	done

.PHONY: figures
figures: $(READY) ## measure the codec, and make the tables and plots of docs/codec.md from it (needs a quiet machine)
	@$(call pip,--constraint $(CONSTRAINTS) --group figures)
	@mkdir -p build/bench
	$(BIN)/python -m bench.codec --json >build/bench/codec.txt || true
	$(BIN)/python -m bench.rates --json >build/bench/rates.txt || true
	$(BIN)/python -m bench._plots build/bench/codec.txt build/bench/rates.txt

.PHONY: clean
clean: ## remove what was built and installed, .venv included
	rm -rf $(VENV) build dist site .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find bench dcr_stream gate stages tests transports -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone, since its build depends on where it comes from. The constraint then keeps whatever else
# is installed from replacing that build.
$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "dcr_stream needs Python 3.11 or newer; '$(PYTHON)' is older or missing: make PYTHON=/path/to/python3.11" >&2; \
		exit 1; }
	@echo "== $(VENV): Python $$($(PYTHON) -c 'import platform; print(platform.python_version())')"
	@$(PYTHON) -m venv $(VENV)
	@$(call pip,--upgrade 'pip>=25.1')
	@echo "== torch $(TORCH)"
	@$(call pip,torch==$(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)))
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >$(CONSTRAINTS)
	@echo "== dcr_stream, with what its demo, tests and checks need"
	@$(call pip,--constraint $(CONSTRAINTS) --editable '.[demo]' --group test --group check)
	@$(BIN)/python -c 'import torch; assert torch.__version__.split("+")[0] == "$(TORCH)", torch.__version__; \
		print("== ready, with torch", torch.__version__)'
	@touch $@

$(READY_DOCS): $(READY)
	@echo "== what the documentation needs"
	@$(call pip,--constraint $(CONSTRAINTS) --group docs)
	@touch $@
