#!/usr/bin/env bash
# Sets up the build for the Makefile: system packages, .venv, Python packages, bagua in editable form without
# the native module (make builds that). Prints nothing and takes a moment if everything is already there.
#
#   scripts/setup.sh           what running needs
#   scripts/setup.sh --build   only what compiling needs, so that make can compile while pip unpacks PyTorch
#   scripts/setup.sh --tests   what running needs, and GoogleTest
#   scripts/setup.sh --lint    what running needs, and rustfmt and clippy
#   scripts/setup.sh --docs    what running needs, and Sphinx; --ray: and Ray
#
# Options combine; with --build, Python packages that only running needs are left out.
#
# System packages are installed only as root; otherwise the command to run is printed. Existing tools are
# kept: a cargo from rustup, a newer cmake, an existing .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
asked_for() { [[ " $options " == *" $1 "* ]]; }
options="$*"

fail() {
  printf '\nset-up: %b\n\n' "$1" >&2
  exit 1
}

have() { command -v "$1" >/dev/null 2>&1; }

command -v "$PYTHON" >/dev/null 2>&1 || fail "$PYTHON was not found; bagua needs Python 3.10 or later."
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  fail "$PYTHON is $("$PYTHON" -V 2>&1); bagua needs Python 3.10 or later. Name another one: make PYTHON=python3.12 ..."

# ---- system packages ------------------------------------------------------------------------------------
packages=()
have c++ || have g++ || packages+=(g++)
have cmake || packages+=(cmake)
have ninja || packages+=(ninja-build)
have cargo || packages+=(cargo)
if [ ! -x .venv/bin/python ]; then
  "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null || packages+=(python3-venv)
fi
"$PYTHON" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
  packages+=(python3-dev)
if asked_for --tests && ! echo '#include <gtest/gtest.h>' | c++ -x c++ -E - >/dev/null 2>&1; then
  packages+=(libgtest-dev)
fi
if asked_for --lint; then
  cargo fmt --version >/dev/null 2>&1 || packages+=(rustfmt)
  cargo clippy --version >/dev/null 2>&1 || packages+=(rust-clippy)
fi

if [ ${#packages[@]} -gt 0 ]; then
  have apt-get || fail "missing: ${packages[*]} (the names of Debian's packages). Install them and run make again."
  if [ "$(id -u)" -ne 0 ]; then
    fail "system packages are missing. Run this, then make again:\n
    sudo apt-get update && sudo apt-get install -y --no-install-recommends ${packages[*]}"
  fi
  echo "set-up: installing system packages: ${packages[*]}"
  export DEBIAN_FRONTEND=noninteractive
  mkdir -p build
  {
    apt-get -o DPkg::Lock::Timeout=300 update &&
      apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "${packages[@]}"
  } >build/apt.log 2>&1 </dev/null || {
    tail -n 20 build/apt.log >&2
    fail "apt-get failed (all of its output: build/apt.log)."
  }
fi

# ---- .venv ----------------------------------------------------------------------------------------------
if ! .venv/bin/python -c '' 2>/dev/null; then
  echo "set-up: creating .venv with $("$PYTHON" -V)"
  "$PYTHON" -m venv --clear .venv || fail "$PYTHON -m venv failed. On Debian: apt-get install -y python3-venv"
fi
# Adds pip to a .venv whose creation was interrupted, or that another tool has made.
.venv/bin/python -c 'import pip' 2>/dev/null || .venv/bin/python -m ensurepip >/dev/null ||
  fail ".venv has no pip. Remove .venv, then make again."

# The stamp holds everything the installed packages depend on, the folder too, since a copied .venv refers to the old one.
wanted=$({ pwd && .venv/bin/python -V && cat pyproject.toml constraints.txt setup.py; } | sha256sum)
# Skips compiling all packages, which takes as long as the rest; Python compiles a module when it is imported.
pip=(.venv/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt)
if [ "$(cat .venv/bagua.stamp 2>/dev/null)" != "$wanted" ]; then
  if [ "$(cat .venv/bagua_build.stamp 2>/dev/null)" != "$wanted" ]; then
    "${pip[@]}" setuptools pybind11 || fail "pip failed; its output is above."
    echo "$wanted" >.venv/bagua_build.stamp
  fi
  if asked_for --build; then exit; fi
  echo "set-up: installing Python packages into .venv (the first time a minute or more: PyTorch is large)"
  BAGUA_SKIP_NATIVE=1 "${pip[@]}" --no-build-isolation --editable '.[dev]' || fail "pip failed; its output is above."
  echo "$wanted" >.venv/bagua.stamp
fi
for extra in docs ray; do # what only `make docs` and `make test-all` need
  if asked_for --$extra && [ "$(cat .venv/bagua_$extra.stamp 2>/dev/null)" != "$wanted" ]; then
    echo "set-up: installing the extra '$extra' into .venv"
    BAGUA_SKIP_NATIVE=1 "${pip[@]}" --no-build-isolation --editable ".[$extra]" || fail "pip failed; its output is above."
    echo "$wanted" >.venv/bagua_$extra.stamp
  fi
done
