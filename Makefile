# Everything runs in .venv at the root. The first target makes it; later ones find it made.
#
#   PYTHON       the interpreter that makes .venv (3.11 or newer)
#   TORCH_INDEX  where to take torch from, if the default index has no CPU build, e.g.
#                make test TORCH_INDEX=https://download.pytorch.org/whl/cpu
#   ARGS         more arguments for demo, test and bench, e.g. make test ARGS="tests/engine -k pages"
#   BASE         the commit that test-changed compares with (where the branch left origin/main or main)

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
BASE ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --retries 10 --timeout 60 -c constraints-dev.txt
CHECK := import sys; sys.exit("make needs Python 3.11 or newer, and %s is %d.%d: run make clean, and give another with \
	PYTHON=..." % (sys.executable, *sys.version_info[:2]) if sys.version_info < (3, 11) else 0)
SOURCES := pyproject.toml tools/pyproject.toml constraints-dev.txt CMakeLists.txt $(shell find csrc -type f)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-changed lint format mutants mutants-csrc bench gpu gpu-wheels clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

setup: $(STAMP) ## make .venv and build the extension

demo: $(STAMP) ## generate and embed text with the bundled models, offline
	HF_HUB_OFFLINE=1 $(BIN)/quintet generate "Once upon a time" --max-tokens 100 $(ARGS)
	HF_HUB_OFFLINE=1 $(BIN)/quintet generate --chat "What is the capital of France?" $(ARGS)
	printf '%s\n' "The invoice is overdue." "Dogs bark at night." "Soup with carrots" | HF_HUB_OFFLINE=1 $(BIN)/quintet rerank "something to eat" -

# These start servers and stop them in the middle of things: they run alone, when the others, side by side, are through
# (failed or not: one run tells all there is to mend).
ALONE := tests/server/processes/% tests/server/test_%
ALL_ALONE := $(wildcard tests/server/processes tests/server/test_*.py)
SLOW := $(shell grep -rlE 'mark\.slow' tests --include='test_*.py')

# 1: a mark; 2: files of those that run beside others, or what to leave out; 3: those that run alone
tests = $(BIN)/python -m pytest -m "$(1)" --numprocesses=auto --maxprocesses=4 --dist=loadfile $(2); others=$$?; \
	$(BIN)/python -m pytest -m "$(1)" $(3) && exit $$others
quick = $(call tests,not slow and not sweep,$(ALL_ALONE:%=--ignore=%),$(ALL_ALONE))
slow = $(call tests,slow,$(filter-out $(ALONE),$(SLOW)),$(or $(filter $(ALONE),$(SLOW)),$(ALL_ALONE)))

test: $(STAMP) ## run the tests that take seconds
ifeq ($(ARGS),)
	$(quick)
else
	$(BIN)/python -m pytest $(ARGS)
endif

test-all: $(STAMP) ## run all tests, also those that take minutes
	($(quick)); quick=$$?; ($(slow)) && exit $$quick

test-changed: $(STAMP) ## run the tests that reach the files changed since BASE, nearest first: ARGS="--list"
	$(BIN)/python scripts/changed_tests.py --base "$(BASE)" --alone "$(ALL_ALONE)" $(ARGS)

lint: $(STAMP) ## style, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite the Python files in the house style
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

mutants: $(STAMP) ## put small faults into the core, and see which the tests miss; into one file: ARGS="FILE TESTS"
	$(BIN)/python scripts/mutants.py $(ARGS)

mutants-csrc: $(STAMP) ## put small faults into the C++ kernels, and see which the tests miss
	$(BIN)/python scripts/mutants_csrc.py $(ARGS)

bench: $(STAMP) ## measure this machine and the engine on it
	$(BIN)/python benchmarks/run.py $(ARGS)

# Without $(STAMP): that would bring a torch of its own. It takes what is installed, in .venv or else by PYTHON.
gpu: ## test and measure on this machine's NVIDIA GPU, offline: ARGS="--only probe"
	$(or $(wildcard $(BIN)/python),$(PYTHON)) scripts/gpu.py $(ARGS)

gpu-wheels: ## fill wheelhouse/gpu with what a GPU machine without a network lacks beside torch
	$(or $(wildcard $(BIN)/python),$(PYTHON)) scripts/on_gpu/wheels.py $(ARGS)

clean: ## remove .venv, builds and caches
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone, so that nothing that depends on it can choose another build. The extension is built
# without isolation: .venv holds the build tools, and build/ stays valid from one time to the next.
$(STAMP): $(SOURCES)
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -c '$(CHECK)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV): a few minutes the first time"
	$(PIP) torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) cmake nanobind ninja scikit-build-core setuptools
	$(PIP) --no-build-isolation -e '.[dev]'
	$(PIP) --no-build-isolation --no-deps -e ./tools
	@touch $@
