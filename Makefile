# The first run of any target creates $(VENV).
VENV   ?= .venv
TORCH  ?= 2.13.0+cpu
JOBS   ?= 2
DEPLOY ?= deploy/local-cpu.yaml
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $(name))))

SHELL := /bin/bash
# Test files run in parallel. Tests of clusters take longest, so they start first; they run one after another.
PYTEST = $(VENV)/bin/pytest -n $(JOBS) --no-loadscope-reorder
PIP = $(VENV)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt
TORCH_INDEX = https://download.pytorch.org/whl
# Such as `cpu` or `cu129`.
BUILD = $(word 2,$(subst +, ,$(TORCH)))
EXTRAS_serve = $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),mooncake)
EXTRAS_dev = dev,$(EXTRAS_serve)

export OMP_NUM_THREADS ?= 1

.PHONY: help serve venv unit test test-full chaos gpu lint bench clean

help:
	@echo "make serve      start a local cluster on http://127.0.0.1:8000; Ctrl-C stops it"
	@echo "make unit       run the unit tests, except those of GPU kernels (two minutes on two cores)"
	@echo "make test       run all tests except the full matrix (fourteen minutes on two idle cores)"
	@echo "make test-full  run all tests, with every combination of the matrices"
	@echo "make chaos      run every fault in a real cluster and print a table of the results"
	@echo "make gpu        run all tests and benchmarks of one GPU, without Ray, and write a dated record"
	@echo "make lint       check formatting, lint, types and import rules"
	@echo "make bench      benchmark the cluster that make serve started"
	@echo "make venv       install Baton and the development tools"
	@echo "make clean      remove everything that these commands created in this folder"

serve: $(VENV)/.serve
	@exec $(VENV)/bin/python -m cluster.cli.foreground $(VENV)/bin/baton up $(DEPLOY)

venv: $(VENV)/.dev

# Tests of GPU kernels interpret and compile them, which takes as long as all other unit tests together.
unit: $(VENV)/.dev
	@$(PYTEST) -m "not full" --ignore=tests/unit/workers/kernels tests/unit tests/simulation/test_network.py

test: $(VENV)/.dev
	@$(PYTEST) -m "not full"

test-full: $(VENV)/.dev
	@$(PYTEST) -m "full or not full"

chaos: $(VENV)/.dev
	@$(VENV)/bin/python -m tests.chaos

gpu: $(VENV)/.dev
	@$(VENV)/bin/python -m tests.gpu

lint: $(VENV)/.dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python -m tests.lint_docstrings workers transfer router cluster tests

bench: $(VENV)/.serve
	@exec $(VENV)/bin/baton bench serve --num-requests 32 --concurrency 4 --input-len 512 --output-len 64

clean:
	rm -rf $(VENV) build dist baton_serve.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# PyPI's torch includes CUDA, so the CPU build, or that for another CUDA, is requested by its full version: first from the
# configured indexes, then from PyTorch's own. The constraints then keep it in place.
$(VENV)/.serve $(VENV)/.dev: $(VENV)/.%: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Baton needs Python 3.11 or newer:  apt-get install -y python3 python3-venv" >&2; exit 1; }
	@test -x $(VENV)/bin/pip || $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "Python's venv module is \
	missing:  apt-get install -y $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" >&2; exit 1; }
	@test -x $(VENV)/bin/pip || { echo "creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "installing PyTorch $(TORCH) (about $(if $(findstring +cpu,$(TORCH)),190 MB,3 GB) the first time)"
	@$(PIP) "torch==$(TORCH)" $(if $(BUILD),2>/dev/null || $(PIP) --extra-index-url $(TORCH_INDEX)/$(BUILD) "torch==$(TORCH)")
	@echo "installing Ray, transformers and the rest, as pinned in constraints.txt"
	@$(PIP) --editable ".[$(EXTRAS_$*)]"
	@touch $(if $(filter dev,$*),$(VENV)/.serve) $@
