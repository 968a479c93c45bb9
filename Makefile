# make setup    virtual environment with torch, DeepSpeed, megatron-core and this package
# make train    GPT on real text, AdamW against OPTIMIZER under FRAMEWORK (see below), on GPUs or two CPU ranks
# make test     the test suite          make lint    ruff and mypy
# make package  wheel and source archive, tried in clean environments          make site    these pages, into build/site
# make quick    what one process of torch can show in a few minutes: formulas, options, routing, plans, steps
#
# Variables: OPTIMIZER=mars-m (mars, mars-adamw, mars-lion, mars-shampoo, mars-m, sonew, ldadam, mkor, mkor-h, mkor-sketch; several
# separated by commas, or all), FRAMEWORK=deepspeed or megatron, ARGS="--steps 1000 --stage 3" (rankwise train --help),
# PYTHON, VENV, TORCH, EXTRAS (those of setup.cfg), PIP_ARGS, WORKERS (of the test suite, a core
# each), PYTEST_ARGS, TESTS (files and folders of the suite), MEGATRON=PATH (a checkout of Megatron-LM to test against: our
# tests of Megatron, unless TESTS names others), ISA=avx2 or default (train and test as on a processor that has AVX2 but
# nothing wider, or nothing beyond every x86-64's; torch's libraries and our own code both).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
TORCH ?= torch==2.13.0
EXTRAS ?= deepspeed,megatron,docs,dev,torchft
PIP_ARGS ?=
OPTIMIZER ?= mars-m
FRAMEWORK ?= deepspeed
ARGS ?=
PYTEST_ARGS ?=
MEGATRON ?=
TESTS ?= $(if $(MEGATRON),tests/megatron_engine)
WORKERS ?= 2
# By file, in the order of the files: results that tests share stay in one worker, and what takes long comes first.
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

ISA ?=
# What each library that chooses instructions by itself, or is compiled for some, is told.
LIMITS_avx2 := RANKWISE_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
LIMITS_default := RANKWISE_ISA=default ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2
ifneq ($(ISA),)
LIMITS := $(LIMITS_$(ISA))
$(if $(LIMITS),,$(error ISA=$(ISA) is invalid: it must be avx2 or default))
endif

# Found before the installed one; its scripts are run by the exhaustive tests.
CHECKOUT := $(if $(MEGATRON),PYTHONPATH=$(abspath $(MEGATRON)) RANKWISE_MEGATRON_LM=$(abspath $(MEGATRON)))

BIN := $(abspath $(VENV))/bin
STAMP := $(VENV)/.setup-done
# DeepSpeed looks for ninja on PATH; it is installed in the environment.
export PATH := $(BIN):$(PATH)

.PHONY: setup train test quick lint package site clean
.DEFAULT_GOAL := setup

setup: $(STAMP)

# torch comes first, so that its build (CPU or CUDA) is chosen here and not by what depends on it.
$(STAMP): setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) "$(TORCH)"
	$(BIN)/python -m pip install $(PIP_ARGS) -e ".[$(EXTRAS)]" "$(TORCH)"
	touch $@

train: setup
	$(LIMITS) $(BIN)/rankwise train --framework $(FRAMEWORK) --optimizer adamw --optimizer "$(OPTIMIZER)" $(ARGS)

test: setup
	$(LIMITS) $(CHECKOUT) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not exhaustive" $(PARALLEL) $(TESTS) $(PYTEST_ARGS)

# Not the frameworks, and nothing that starts ranks.
QUICK := tests/test_architecture.py $(addprefix tests/,mars sonew ldadam mkor options routing sharding statistics updates planning step)

quick: setup
	$(LIMITS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not exhaustive and not slow" $(PARALLEL) $(QUICK) $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Wheel and source archive, each installed into an environment of its own, which then looks at itself.
package:
	rm -rf dist build/packaging
	$(PYTHON) -m venv build/packaging/tools
	build/packaging/tools/bin/python -m pip install $(PIP_ARGS) build twine
	build/packaging/tools/bin/python -m build
	build/packaging/tools/bin/python -m twine check --strict dist/*
	for archive in dist/*.whl dist/*.tar.gz; do \
	    $(PYTHON) -m venv --clear build/packaging/clean && \
	    build/packaging/clean/bin/python -m pip install $(PIP_ARGS) "$(TORCH)" "$$archive" && \
	    (cd build/packaging && clean/bin/rankwise doctor) || exit 1; \
	done

site: setup
	$(BIN)/mkdocs build --strict

clean:
	rm -rf build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
