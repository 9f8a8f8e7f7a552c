#!/usr/bin/env bash
# Runs the benchmarks given as arguments, or all that take minutes, and lists those that were skipped (status 77).
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- $(grep -l '__name__ == "__main__"' benchmarks/*/*.py | grep -vE "replay/(performance|simulated|choice).py|training/time_to_loss.py")
skipped=()

for script in "$@"; do
  echo "== $script"
  module=${script%.py}
  status=0
  "${PY:-.venv/bin/python}" -m "${module//\//.}" || status=$?
  case $status in
    0) ;;
    77) skipped+=("$script") ;;
    *) exit $status ;;
  esac
done

[ ${#skipped[@]} -eq 0 ] || echo "bench: skipped, for the reasons above: ${skipped[*]}"
