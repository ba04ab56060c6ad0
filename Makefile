# slotd: build, check, try.  `make` alone prints the targets.
#
# PYTHON chooses the interpreter for a new .venv (3.11 or newer). When a virtual environment is active,
# the targets install into that one; otherwise into ./.venv, which they create.

PYTHON ?= python3
MODEL =

.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Active means: VIRTUAL_ENV says so, or $(PYTHON) itself lives in a virtual environment.
VENV := $(VIRTUAL_ENV)
ifeq ($(strip $(VENV)),)
  VENV := $(shell $(PYTHON) -c 'import sys; print(sys.prefix if sys.prefix != sys.base_prefix else "")' 2>/dev/null)
endif
ifeq ($(strip $(VENV)),)
  VENV := .venv
endif
PY := $(VENV)/bin/python

TYPED := daemon client protocol

# Architectures that `make kernels` compiles for.
ARCHS = sm_80 sm_86 sm_89 sm_90 sm_100 sm_120

# Processes that run tests side by side: whole files, each process with its own cores (tests/conftest.py).
# `make test SIDE_BY_SIDE=` runs them one after the other.
SIDE_BY_SIDE = -n 2 --dist loadfile --no-loadscope-reorder

# What the targets for a GPU import. Where it is all there, nothing is installed: a machine with a GPU may have
# its packages from elsewhere and reach no package index.
GPU_IMPORTS := cupy, gguf, hypothesis, numpy, pytest, pytest_timeout

# $(call install,STAMP,WHAT): pip install WHAT unless STAMP says that it was done. A stamp lives in the
# environment that it describes and holds the path of the checkout installed there, so a fresh environment,
# another checkout or a changed setup.cfg each lead to a new install.
define install
@if [ "$$(cat "$(VENV)/$(1)" 2>/dev/null)" != "$(CURDIR)" ] \
    || [ setup.cfg -nt "$(VENV)/$(1)" ] || [ pyproject.toml -nt "$(VENV)/$(1)" ]; then \
  echo "installing slotd into $(VENV)" >&2; \
  "$(PY)" -m pip install --quiet --editable '$(2)' >&2 && echo "$(CURDIR)" > "$(VENV)/$(1)"; fi
endef

# $(call on_gpu,ARGUMENTS): Python with the packages above and this checkout as slotd, installed or not.
define on_gpu
@python="$(PY)"; [ -x "$$python" ] || python="$(PYTHON)"; \
export PYTHONPATH="$(CURDIR)/.typing$${PYTHONPATH:+:$$PYTHONPATH}"; \
"$$python" -c 'import $(GPU_IMPORTS)' 2>/dev/null || { $(MAKE) install-test && python="$(PY)"; } && \
"$$python" -c 'import cupy; print("GPU of compute capability", cupy.cuda.Device().compute_capability)' && \
"$$python" $(1)
endef

.PHONY: help run test lint ruff mypy test-gpu kernels bench bench-gpu build clean install install-test links python

help:
	@echo 'make run       chat with the default model; without a terminal: answer one question'
	@echo 'make test      ruff, mypy and pytest (the default model is fetched once, a download of 93 MB)'
	@echo 'make lint      ruff and mypy'
	@echo 'make test-gpu  the tests that need a CUDA device'
	@echo 'make kernels   compile the CUDA kernels for all architectures (no GPU needed)'
	@echo 'make bench     measure rates and overheads, as text'
	@echo 'make bench-gpu the table of GPU figures, as text and JSON (model files of 14 GB are made once)'
	@echo 'make build     a wheel in dist/'
	@echo 'make clean     remove build products and caches (an environment in .venv stays)'
	@echo
	@echo 'PYTHON=...     the interpreter (>= 3.11) when no virtual environment is active'
	@echo 'MODEL=FILE     another GGUF for run, bench and bench-gpu'

# Leaving with Ctrl-C (exit code 130) is no failure of the target. On a terminal the chat reads the key; without
# one the signal hits the shell too, which must live to say so: a trap of its own is not inherited.
run: install
	@trap : INT; "$(VENV)/bin/slotd" try $(if $(MODEL),-m "$(MODEL)") || [ $$? -eq 130 ]

# A complaint of the linters must not hide the result of the tests: both run, either one fails the target.
test: install-test
	@lint=0; $(MAKE) --keep-going lint || { lint=1; echo 'make lint failed, see above; the tests run nevertheless' >&2; }; \
	tests=0; "$(PY)" -m pytest $(SIDE_BY_SIDE) || tests=$$?; \
	if [ $$lint -ne 0 ]; then echo 'make lint failed, see above the tests' >&2; fi; \
	[ $$lint -eq 0 ] && exit $$tests || exit 1

lint: ruff mypy

ruff: install-test
	"$(PY)" -m ruff check .
	"$(PY)" -m ruff format --check --quiet .

mypy: install-test links
	"$(PY)" -m mypy $(TYPED:%=-p slotd.%)

test-gpu: links
	$(call on_gpu,-m pytest -m gpu tests/gpu)

kernels: install-test
	"$(PY)" -m slotd.daemon.ops.kernels --arch $(ARCHS)

bench: install-test
	"$(VENV)/bin/slotd" bench $(if $(MODEL),-m "$(MODEL)")
	"$(PY)" -m tests.bench
	"$(PY)" -m tests.bench.snapshots

bench-gpu: links
	$(call on_gpu,-m tests.bench.gpu $(if $(MODEL),-m "$(MODEL)"))

# setuptools ships what it finds in build/lib, deleted modules included: start from nothing.
build: install
	rm -rf build dist
	"$(PY)" -m pip wheel --no-deps --wheel-dir dist .

clean:
	rm -rf build dist slotd.egg-info .typing .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f "$(VENV)/.slotd-run" "$(VENV)/.slotd-test"
	find $(TYPED) tests -type d -name __pycache__ -prune -exec rm -rf {} +
	@if [ -d .venv ]; then echo '.venv stays; remove it with: rm -rf .venv'; fi

# mypy cannot find the three folders under their installed names (slotd.daemon is daemon/), so it reads
# them through links. They are made here and not kept in git: a checkout without symbolic links, or an
# archive, would have text files in their place.
links:
	@mkdir -p .typing/slotd
	@for name in $(TYPED); do ln -sfn "../../$$name" ".typing/slotd/$$name"; done

# The test environment holds all that `run` needs, so its stamp stands for both.
install: python
	$(call install,.slotd-run,.)

install-test: python
	$(call install,.slotd-test,.[test])
	@cp -p "$(VENV)/.slotd-test" "$(VENV)/.slotd-run"

python:
	@if [ ! -x "$(PY)" ] && [ "$(VENV)" != .venv ]; then \
	  echo "The active virtual environment $(VENV) has no bin/python: deactivate it or make it anew." >&2; exit 1; fi
	@python="$(PY)"; [ -x "$$python" ] || python="$(PYTHON)"; \
	version="$$("$$python" --version 2>&1)" || { \
	  echo "slotd needs Python 3.11 or newer, and '$$python' does not run. Name one: make PYTHON=python3.12" >&2; exit 1; }; \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "slotd needs Python 3.11 or newer, and '$$python' is $$version. Name one: make PYTHON=python3.12" >&2; \
	  [ "$$python" = "$(PYTHON)" ] || echo "(the environment $(VENV) was made with it: leave or remove it first)" >&2; \
	  exit 1; }
	@[ -x "$(PY)" ] || { echo "making a virtual environment in $(VENV)" >&2; "$(PYTHON)" -m venv "$(VENV)"; } \
	  || { rm -rf .venv; exit 1; }
	@"$(PY)" -m pip --version >/dev/null 2>&1 || "$(PY)" -m ensurepip >&2
