# Every target makes its own environment; a second call finds it ready.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# Two workers more than cores, since some tests wait for timers; at most four.
CORES := $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
TEST_PROCESSES ?= $(shell test $(CORES) -lt 2 && echo 3 || echo 4)

.PHONY: install lock borders pythons test test-all test-slurm again check bench docs quickstart clean help otherpython

help:
	@echo "make install     the environment in $(VENV), the package in it, the C++ extension if there is a compiler;"
	@echo "                 exact versions from requirements/lock.txt; NEWEST=1 takes the newest instead"
	@echo "make quickstart  the whole pipeline on this machine: text → tokens → training → Hugging Face → a sample and a report"
	@echo "make test        the tests            make check  formatting, lint, types"
	@echo "make test-all    with more cases of what they test, in twice the time"
	@echo "make test-slurm  those that start a Slurm cluster of their own; they need root, slurm-wlm and munge"
	@echo "make docs        the documentation as a site in build/site"
	@echo "make bench       the CPU benchmarks   PYTHON=python3.12 chooses the interpreter"
	@echo "make borders     the tests that touch other packages, at their oldest, locked and newest versions"
	@echo "make pythons     all tests on other Pythons: make pythons ARGS='python3.10 python3.12'"
	@echo "make lock        requirements/lock.txt anew, from the newest versions"

install: $(VENV)/installed

$(VENV)/installed: setup.py pyproject.toml requirements/lock.txt $(wildcard csrc/*)
	@PYTHON="$(PYTHON)" VENV="$(VENV)" NEWEST="$(NEWEST)" bash scripts/install.sh
	@echo "$(if $(NEWEST),newest,lock)" > $@

# NEWEST=1 on the command line means the newest versions now, also where an environment is ready.
ifeq ($(origin NEWEST),command line)
$(VENV)/installed: otherpython
endif

lock:
	@PYTHON="$(PYTHON)" bash scripts/lock.sh

borders: install
	@$(BIN)/python scripts/borders.py $(ARGS)

pythons: install
	@$(BIN)/python scripts/pythons.py $(ARGS)

# PYTHON=… on the command line means this interpreter, also where an environment of another is ready.
VERSION_OF = $(shell $(1) -c 'import sys; print(*sys.version_info[:2])' 2>/dev/null)
ifeq ($(origin PYTHON),command line)
ifneq ($(call VERSION_OF,$(PYTHON)),$(call VERSION_OF,$(BIN)/python))
$(VENV)/installed: otherpython
endif
endif
otherpython:

quickstart: install
	$(BIN)/blackmamba quickstart $(ARGS)

# Tests get the environment of a new user: what else a machine sets must neither help nor disturb. These variables of
# the caller's reach them, and those of SETTINGS="NAME=VALUE ...".
# They start no Slurm daemons unless asked to: REAL_SLURM=require make test.
PASSED := HOME PATH LANG TMPDIR CUDA_VISIBLE_DEVICES REAL_SLURM LLAMA_CPP_PYTHON VLLM_PYTHON MAMBA_SSM_SOURCE
PASSED += BLACKMAMBA_ISA ATEN_CPU_CAPABILITY MKL_ENABLE_INSTRUCTIONS ONEDNN_MAX_CPU_ISA
SETTINGS ?=
EMPTY = env -i $(foreach name,$(PASSED),$(if $(value $(name)),$(name)='$(value $(name))')) $(SETTINGS)
# `make test` leaves out what is marked thorough: more cases of what the others test.
TESTS = $(EMPTY) $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadgroup --no-loadscope-reorder
test test-all again: export REAL_SLURM ?= off
test-slurm: export REAL_SLURM = require

test: install
	$(TESTS) -m "not thorough" $(ARGS)

test-all: install
	$(TESTS) $(ARGS)

test-slurm: install
	$(EMPTY) $(BIN)/python -m pytest -n 2 --dist loadgroup tests/slurm $(ARGS)

# The failed tests of a run whose report ARGS names.
again: install
	$(EMPTY) $(BIN)/python .ci/again.py $(ARGS)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: install
	@$(BIN)/python -c 'import mambapy' 2>/dev/null || VENV="$(VENV)" PYTHON=$(BIN)/python bash scripts/install.sh dev bench
	$(BIN)/python -m benchmarks.run $(ARGS)

docs: install
	@$(BIN)/python -c 'import material, mkdocstrings' 2>/dev/null || VENV="$(VENV)" PYTHON=$(BIN)/python bash scripts/install.sh dev docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open build/site/index.html in a browser"

clean:
	rm -rf $(VENV) build *.egg-info
