#!/usr/bin/env bash
# Runs the C++ tests under the thread sanitizer, then under the address and undefined-behaviour sanitizers.
set -euo pipefail
cd "$(dirname "$0")/.."

# GCC 12's sanitizers cannot place their shadow where newer kernels randomise addresses widely.
fixed_addresses=()
if setarch "$(uname -m)" -R true 2>/dev/null; then fixed_addresses=(setarch "$(uname -m)" -R); fi

export TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1 ${TSAN_OPTIONS:-}"
export ASAN_OPTIONS="detect_stack_use_after_return=1 ${ASAN_OPTIONS:-}"
# The number of random collectives per transport (csrc/tests/test_collectives_stress.cc).
export STRESS_CALLS="${STRESS_CALLS:-10000}"
export UBSAN_OPTIONS="print_stacktrace=1 ${UBSAN_OPTIONS:-}"
if [ -f csrc/tests/tsan.supp ]; then TSAN_OPTIONS+=" suppressions=$PWD/csrc/tests/tsan.supp"; fi

for sanitizer in thread address; do
  echo "sanitize: $sanitizer"
  build_dir=build/sanitize-$sanitizer
  cmake -S . -B "$build_dir" -G Ninja -DBAGUA_SANITIZE=$sanitizer -DBAGUA_BUILD_TESTS=ON \
    -DBAGUA_BUILD_PYTHON=OFF -DBAGUA_CUDA=0 -DBAGUA_WARNINGS_AS_ERRORS=ON \
    -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON -DCMAKE_UNITY_BUILD=OFF >/dev/null
  cmake --build "$build_dir" --target bagua_tests
  "${fixed_addresses[@]}" "$build_dir/bagua_tests" --gtest_brief=1
done
