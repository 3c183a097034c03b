# Needs only make and Python 3.11 or later; everything else is installed into .venv by the first target you ask for.

# The first of these that is new enough; make PYTHON=/path/to/python3 chooses another.
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

BIN := .venv/bin
READY := .venv/.ready
TESTABLE := .venv/.testable
SITE_TOOLS := .venv/.site_tools
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all check format docs bench reproduce clean

help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 \t\2/p' Makefile | expand -t 18

setup: $(READY)  ## create .venv and install Rainband and its tools (other commands do it when needed)

train: $(READY)  ## train the digits with Downpour: four workers, two servers
	@echo "train: digits, downpour, 4 workers, 2 servers"
	@$(BIN)/rainband train digits downpour --workers 4 --servers 2

test: $(TESTABLE)  ## run the quick tests
	@echo "test: without processes"
	@$(BIN)/python -m pytest -q -n logical --maxprocesses 8 --dist worksteal -m "not slow and not gpu and not processes"
	@echo "test: with processes"
	@$(BIN)/python -m pytest -q -m "processes and not slow and not gpu"

test-all: $(TESTABLE)  ## run all tests, with longer hypothesis searches
	@echo "test: all"
	@$(BIN)/python -m pytest -q --hypothesis-profile=search

check: $(READY)  ## check format, lint, types, layers, structure and words
	@echo "check: format"
	@$(BIN)/ruff format --check --quiet . || { echo "some files are not formatted: type make format"; exit 1; }
	@echo "check: lint"
	@$(BIN)/ruff check --quiet .
	@echo "check: types"
	@$(BIN)/mypy
	@echo "check: layers, structure and words"
	@$(BIN)/python -m pytest -q tests/test_layers.py tests/test_structure.py tests/test_words.py

format: $(READY)  ## format the code and repair what lint can repair
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --fix --quiet .

docs: $(SITE_TOOLS)  ## write the generated pages, and build the documentation site into site/
	@echo "docs: generated pages"
	@$(BIN)/python docs/strategy_table.py --write
	@$(BIN)/python docs/cli_page.py --write
	@echo "docs: site"
	@$(BIN)/zensical build --strict

bench: $(READY)  ## run all benchmarks on this machine
	@echo "bench: all"
	@$(BIN)/rainband bench all

reproduce: $(READY)  ## measure all claims of papers anew, in hours; what is finished is kept in build/reproduce
	@$(BIN)/python -m reproduce all --results build/reproduce --resume

clean:  ## remove .venv and caches; runs stay
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache build dist site
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "rainband needs Python 3.11 or later, and there is none on the PATH:" \
		"install one, or name it: make PYTHON=/path/to/python3"; exit 1; }
	@echo "set-up: .venv from $(PYTHON)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv || { echo "$(PYTHON) cannot make a virtual environment:" \
		"install its venv module (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@echo "set-up: installing rainband and its tools (minutes the first time, as torch is large)"
	@$(INSTALL) -e '.[data,plots,dev]'
	@touch $@

# The frameworks that adapters are for: minutes to install, and only their tests need them.
$(TESTABLE): $(SITE_TOOLS)
	@echo "set-up: installing Lightning, Transformers, Accelerate, TensorBoard, Ray and the dashboard for their tests"
	@$(INSTALL) -e '.[dashboard,lightning,hf,tensorboard,ray]'
	@touch $@

$(SITE_TOOLS): $(READY)
	@echo "set-up: installing the tools for the documentation site"
	@$(INSTALL) -e '.[docs]'
	@touch $@
