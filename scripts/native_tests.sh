#!/usr/bin/env bash
# Runs the C++ tests of the binary $1: first those that do not depend on time, in three processes at once, because some
# wait; then the others, one at a time.
set -euo pipefail
binary=$1
limit_s=600

timed=$(tr -d ' \n' <<'EOF'
Cancel.*:ControlLink.*:Deadline.*:Doorbell.*:FaultsOfOneEnd.*:Leave.*:ProcessLink.*:
*/BufferedFaults.*:*/EngineOver.*:*/Faults.*
EOF
)

logs=$(mktemp -d)
# Ctrl-C does not reach a script's background processes.
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$logs"' EXIT

# $1: a name; $2: the filter; $3: the number of processes. Prints the output of processes that failed.
run_tests() {
  local begin=$SECONDS shard failed=0 pids=()
  rm -f "$logs"/*
  for ((shard = 0; shard < $3; ++shard)); do
    GTEST_TOTAL_SHARDS=$3 GTEST_SHARD_INDEX=$shard timeout $limit_s \
      "$binary" --gtest_brief=1 --gtest_filter="$2" >"$logs/$shard" 2>&1 &
    pids+=($!)
  done
  for shard in "${!pids[@]}"; do
    wait "${pids[shard]}" || { failed=$?; cat "$logs/$shard"; echo "C++ tests, $1: exit status $failed"; }
  done
  if [ "$failed" = 0 ]; then
    awk -v what="$1" -v seconds=$((SECONDS - begin)) '/^\[  PASSED  \]/ { passed += $4 }
      END { print "C++ tests, " what ": " passed " passed in " seconds " s" }' "$logs"/*
  fi
  return "$failed"
}

run_tests "untimed" "-$timed" 3
run_tests "timed" "$timed" 1
