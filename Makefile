# Every target sets up what it needs (.venv, system packages, the native module) and does nothing twice.
#   make demo PYTHON=python3.12     another interpreter for .venv
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= python3
PY := .venv/bin/python
DEV := build/dev
export PYTHON
# Compiling the CUDA kernels takes minutes, and most machines cannot run them: BAGUA_CUDA=1 make build asks for them.
export BAGUA_CUDA ?= 0
export PATH := $(PATH):$(HOME)/.cargo/bin
unexport PYTHONDONTWRITEBYTECODE # without what pytest keeps, each of its processes compiles all tests anew

# Folders are named too: their time changes when a file is added or removed.
NATIVE_SOURCES := CMakeLists.txt setup.py pyproject.toml $(shell find csrc rust_core -path rust_core/target -prune -o \
  \( -type d -o -name '*.cc' -o -name '*.cu' -o -name '*.h' -o -name '*.map' -o -name '*.rs' -o -name 'Cargo.*' \) -print)
NATIVE := $(DEV)/native$(if $(filter 1,$(BAGUA_CUDA)),_cuda).stamp
ifeq ($(wildcard bagua/_C*.so),)
.PHONY: $(NATIVE)
endif

PYTEST = $(PY) -m pytest $(PYTEST_ARGS)
# One more than there are cores, because some tests wait; with many cores four are enough.
PARALLEL := --numprocesses $(shell n=$$(nproc); echo $$((n < 4 ? n + 1 : 4))) --dist worksteal
# The tests whose outcome depends on time run after the rest, and no more of them at once than leave cores idle: most of
# them wait, and all must pass beside what keeps the cores busy. Only the files that have some need be imported.
TWO_PROCESSES := --numprocesses 2 --dist worksteal
TIMED = -m "not slow and timed" $(TWO_PROCESSES) $$(grep -rl --include='test_*.py' 'mark\.timed' tests)
TIMES ?= 1
PORT ?= 8000

.PHONY: help demo test test-all test-timed test-gpu test-native package wheels wheel-test lint format bench bench-gpu sanitize build setup-and-native setup setup-build setup-system setup-tests setup-lint setup-docs docs docs-serve clean
# Whatever -j says: two targets that set up would change .venv at once.
ifndef IS_BESIDE
.NOTPARALLEL:
endif

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 18

demo: build ## train a CNN on two ranks with bytegrad, and beside it with torch DDP
	@bash scripts/demo.sh

test: test-native ## Rust, C++ and Python tests but the slow ones
	$(PYTEST) -m "not slow and not timed" $(PARALLEL)
	$(PYTEST) $(TIMED)

test-all: test-native ## all tests, the slow ones and the examples too
	@bash scripts/setup.sh --ray
	$(PYTEST) -m "not timed" $(PARALLEL)
	$(PYTEST) -m "timed" $(TWO_PROCESSES)

test-timed: setup-tests build ## the tests whose outcome depends on time, TIMES=1 times in a row
	for run in $$(seq $(TIMES)); do echo "run $$run of $(TIMES)"; $(PYTEST) $(TIMED); done

test-gpu: setup-tests ## the tests that run on a GPU, which other targets run too where there is one; builds with CUDA
	@$(MAKE) build BAGUA_CUDA=1
	$(PYTEST) -m gpu

test-native: build setup-tests
	cargo test --quiet --offline --locked --manifest-path rust_core/Cargo.toml --target-dir build/rust
	cmake -S . -B $(DEV) -DBAGUA_BUILD_TESTS=ON >$(DEV)/configure.log
	@# Beside it what tests need compiled: its minute is no test's, which have a time limit.
	$(PY) -c "from tests import emulated_device as e; e.unavailable() or e.build()" & \
	  cmake --build $(DEV) --target bagua_tests; wait $$!
	@# Beside them pytest compiles its files once, which each of its processes would do by itself. What fails here fails
	@# in the tests, too, which say it.
	@$(PYTEST) --collect-only -qq >$(DEV)/collected.log 2>&1 & bash scripts/native_tests.sh $(DEV)/bagua_tests; wait

docs: build setup-docs ## the site, from docs/ and the docstrings, in build/docs
	$(PY) -m sphinx -q -W --keep-going -j auto -c docs . build/docs
	@echo "build/docs/index.html"

docs-serve: docs ## the site at http://127.0.0.1:8000, PORT=8000
	$(PY) -m http.server --bind 127.0.0.1 --directory build/docs $(PORT)

package: setup-tests build ## the sdist, and a wheel built from it, by themselves
	$(PY) -m pytest tests/structure/test_package.py

wheels: setup-build ## manylinux wheels into dist/, for every Python on PATH; PYTHONS="..." names others; BAGUA_CUDA=1: with CUDA
	@bash scripts/wheels.sh $(PYTHONS)

wheel-test: setup ## a manylinux wheel for .venv's Python, and the quick start from it where there is no compiler
	@bash scripts/wheels.sh $(PY)
	@bash scripts/wheel_test.sh

lint: setup-lint ## ruff, clang-format, cargo fmt, clippy
	@bash scripts/lint.sh

format: setup-lint ## let the formatters rewrite what they can
	$(PY) -m ruff check --quiet --fix . || true
	$(PY) -m ruff format --quiet .
	find csrc -name '*.cc' -o -name '*.h' -o -name '*.cu' | xargs .venv/bin/clang-format -i
	cargo fmt --manifest-path rust_core/Cargo.toml

bench: build ## every script in benchmarks/ that takes minutes
	@bash scripts/bench.sh

bench-gpu: setup-tests ## benchmarks/cuda: rates of kernels, ranks that share a GPU, models wrapped and not
	@$(MAKE) build BAGUA_CUDA=1
	@bash scripts/bench.sh benchmarks/cuda/kernels.py benchmarks/cuda/one_gpu.py benchmarks/cuda/gpu_step.py

sanitize: setup-tests ## the C++ tests under the thread and the address sanitizer
	@bash scripts/sanitize.sh

build: setup-build ## bagua._C, in place
	@# Compiling has a core left over for pip, which takes as long.
	@$(MAKE) $(if $(filter -j% --jobserver%,$(MAKEFLAGS)),,-j2) IS_BESIDE=1 setup-and-native

setup-and-native: setup $(NATIVE)

$(NATIVE): $(NATIVE_SOURCES) | setup-build
	BAGUA_BUILD_DIR=$(DEV) BAGUA_CMAKE_ARGS=-DBAGUA_WARNINGS_AS_ERRORS=ON $(PY) setup.py --quiet build_ext --inplace
	@rm -f $(DEV)/native*.stamp # with and without CUDA are one file
	@touch $@

setup: setup-build ## .venv with all Python packages; system packages when root
	@bash scripts/setup.sh

setup-build:
	@bash scripts/setup.sh --build

setup-system: # of all targets, at once
	@bash scripts/setup.sh --build --tests --lint

setup-tests: setup
	@bash scripts/setup.sh --tests

setup-lint: setup
	@bash scripts/setup.sh --lint

setup-docs: setup
	@bash scripts/setup.sh --docs

clean: ## remove what was built; .venv stays
	rm -rf build dist *.egg-info bagua/_C*.so rust_core/target .pytest_cache .ruff_cache
	find bagua tests examples benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +
