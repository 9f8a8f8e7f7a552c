#!/usr/bin/env bash
# Runs every formatter and linter, even after one has failed; `make format` fixes formatting.
set -uo pipefail
cd "$(dirname "$0")/.."
status=0

check() {
  echo "lint: $*"
  "$@" || status=1
}

check .venv/bin/python -m ruff check --quiet .
check .venv/bin/python -m ruff format --quiet --check .
check .venv/bin/python scripts/algorithms_table.py --check
check .venv/bin/python scripts/draw.py --check

# Uses the clang-format of .venv, pinned in constraints.txt, because other versions format differently.
mapfile -t sources < <(find csrc -name '*.cc' -o -name '*.h' -o -name '*.cu' | sort)
echo "lint: clang-format on ${#sources[@]} files of csrc"
.venv/bin/clang-format --dry-run --Werror "${sources[@]}" || status=1

check cargo fmt --manifest-path rust_core/Cargo.toml --check
check cargo clippy --quiet --offline --locked --all-targets --manifest-path rust_core/Cargo.toml \
  --target-dir build/rust -- -D warnings

[ $status -eq 0 ] && echo "lint: clean"
exit $status
