# Everything runs in .venv at the root. The first target makes it; later ones find it made.
#
#   PYTHON       the interpreter that makes .venv (3.11 or newer)
#   TORCH_INDEX  where to take torch from, if the default index has no CPU build, e.g.
#                make test TORCH_INDEX=https://download.pytorch.org/whl/cpu
#   ARGS         more arguments for demo, test and bench, e.g. make test ARGS="tests/engine -k pages"
#   RELEASE      the release of transformers for test-transformers; the oldest that pyproject.toml allows, if not given
#   BASE         the commit that test-changed compares with (where the branch left origin/main or main)

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
RELEASE ?= $(shell sed -nE 's/^ *"transformers>=([0-9.]+)",/\1/p' pyproject.toml)
BASE ?=

VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.stamp-run
STAMP := $(VENV)/.stamp
DOCS := $(VENV)/.stamp-docs
RELEASING := $(VENV)/.stamp-release
# --no-compile: Python compiles what is imported, a small part of what is installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --retries 10 --timeout 60 -c constraints-dev.txt
REQUIRES := $(BIN)/python -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*(project["optional-dependencies"][sys.argv[1]] if sys.argv[1:] else project["dependencies"]), sep="\n")'
CHECK := import sys; sys.exit("make needs Python 3.11 or newer, and %s is %d.%d: run make clean, and give another with \
	PYTHON=..." % (sys.executable, *sys.version_info[:2]) if sys.version_info < (3, 11) else 0)
# A demo needs the kernels of this processor alone; what tests and checks need compiles those of all.
ISAS := $(if $(or $(wildcard $(STAMP)),$(filter-out demo setup-run,$(MAKECMDGOALS))),ALL,NATIVE)
SOURCES := pyproject.toml tools/pyproject.toml constraints-dev.txt CMakeLists.txt $(shell find csrc -type f)

# A test run starts a thousand processes; without it each compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-run .python .packages .extension demo test test-ci test-all test-changed test-sweep test-transformers lint format mutants
.PHONY: wheel docs mutants-csrc bench gpu gpu-wheels clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

setup: $(STAMP) ## make .venv with all that development needs, and build the extension

setup-run: $(RUN) ## make .venv with what running needs, and build the extension

demo: $(RUN) ## generate and embed text with the bundled models, offline
	HF_HUB_OFFLINE=1 $(BIN)/quintet generate "Once upon a time" --max-tokens 100 $(ARGS)
	HF_HUB_OFFLINE=1 $(BIN)/quintet generate --chat "What is the capital of France?" $(ARGS)
	printf '%s\n' "The invoice is overdue." "Dogs bark at night." "Soup with carrots" | HF_HUB_OFFLINE=1 $(BIN)/quintet rerank "something to eat" -

# One session; a worker that is through takes tests over from another.
TESTS := $(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=worksteal
# The part of so many that the commit's hash names: $(call part,10) is 2/10, say.
HASH := $(shell git rev-parse --short=7 HEAD 2>/dev/null || echo 0)
part = $(shell echo $$((0x$(HASH) % $(1) + 1)))/$(1)

test: $(STAMP) ## run the tests that take seconds, and a tenth of the longer ones, which the commit's hash chooses
ifeq ($(ARGS),)
	$(TESTS) -m "not slow and not sweep" --share long=$(call part,10)
else
	$(BIN)/python -m pytest $(ARGS)
endif

test-ci: $(STAMP) ## run the tests that take seconds, a tenth of the longer ones, the slow ones and the sweep
	$(TESTS) --share long=$(call part,10) --share slow=$(call part,10) --share sweep=$(call part,10)

test-all: $(STAMP) ## run all but the sweep
	$(TESTS) $(or $(ARGS),-m "not sweep")

test-sweep: $(STAMP) ## run the sweep, which takes hours; a share that takes minutes: ARGS="--share sweep=3/10"
	$(TESTS) -m sweep $(ARGS)

# A release of transformers beside the one in .venv, with the two packages whose versions it bounds.
TRANSFORMERS = build/transformers-$(RELEASE)
BESIDE = $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --target $(TRANSFORMERS).part
BOUNDED := from importlib.metadata import requires; print(*(each for each in requires("transformers") \
	if each.startswith(("tokenizers", "huggingface")) and ";" not in each), sep="\n")

build/transformers-%: | $(STAMP)
	rm -rf $@.part
	$(BESIDE) transformers==$(RELEASE)
	PYTHONPATH=$@.part $(BIN)/python -c '$(BOUNDED)' >$@.part/bounded.txt
	$(BESIDE) -r $@.part/bounded.txt
	mv $@.part $@

test-transformers: $(TRANSFORMERS) ## test the Transformers backend with the oldest transformers allowed, or with RELEASE=5.24.0
	PYTHONPATH=$< $(BIN)/python -m pytest -rs $(ARGS) tests/e2e/families/test_backend*.py \
		tests/reports/checkpoints/test_no_raw_exception_of_transformers.py

test-changed: $(STAMP) ## run the tests that reach the files changed since BASE, nearest first: ARGS="--list"
	$(BIN)/python scripts/changed_tests.py --base "$(BASE)" $(ARGS)

lint: $(STAMP) ## style, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite the Python files in the house style
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

docs: $(DOCS) ## build the documentation site into build/site; a broken link fails it
	$(BIN)/mkdocs build --strict
	@echo "build/site/index.html: $$(find build/site -name '*.html' | wc -l) pages"

wheel: $(RELEASING) ## build the sdist and a wheel into dist/, and try it: ARGS="--python python3.10 python3.13"
	$(BIN)/python scripts/wheel.py $(ARGS)

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

# The newest pip resolves in half the time of the one that Python brings, and is there sooner.
$(BIN)/pip: | .python
	@$(PYTHON) -m venv --without-pip $(VENV)
	@$(PYTHON) -m pip --disable-pip-version-check --python $(BIN)/python install --quiet --no-compile pip 2>/dev/null || \
		$(BIN)/python -m ensurepip --default-pip

.python:
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -c '$(CHECK)'

# The extension compiles while packages come in: it needs the build tools and none of them. It is built without isolation:
# .venv holds the tools, and build/ stays valid from one time to the next.
$(RUN): $(SOURCES) | .python $(BIN)/pip
	@echo "setting up $(VENV): two to three minutes the first time"
	$(PIP) cmake nanobind ninja scikit-build-core setuptools
	@$(MAKE) --no-print-directory --jobs=2 .packages .extension ISAS=$(ISAS)
	@touch $@

# torch comes first and alone, so that nothing that depends on it can choose another build.
.packages:
	$(PIP) torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@$(REQUIRES) > $(VENV)/requires.txt
	$(PIP) -r $(VENV)/requires.txt
	@echo "packages are installed; the kernels of this processor compile until all is ready"
	@$(BIN)/python -c 'import torch, quintet.api.llm' # Python compiles them while the extension still builds

.extension:
	MAKEFLAGS= $(PIP) --no-build-isolation --no-deps -C cmake.define.QUINTET_ISAS=$(ISAS) -e .

$(STAMP): $(RUN)
	@echo "adding what tests, checks and benchmarks need to $(VENV)"
	@$(REQUIRES) dev > $(VENV)/requires-dev.txt
	$(PIP) -r $(VENV)/requires-dev.txt
	$(PIP) --no-build-isolation --no-deps -e ./tools
	@$(MAKE) --no-print-directory .extension ISAS=ALL
	@touch $@

# The site needs neither torch nor quintet.
$(DOCS): pyproject.toml constraints-dev.txt | .python $(BIN)/pip
	@$(REQUIRES) docs > $(VENV)/requires-docs.txt
	$(PIP) -r $(VENV)/requires-docs.txt
	@touch $@

$(RELEASING): $(STAMP)
	@$(REQUIRES) release > $(VENV)/requires-release.txt
	$(PIP) -r $(VENV)/requires-release.txt
	@touch $@
