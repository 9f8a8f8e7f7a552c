// The CPU kernels pinned to the baseline, which any x86-64 and every other architecture runs, against the
// dispatched ones.
#define BAGUA_MULTIVERSION
#define BAGUA_CLONE "baseline"
#define BAGUA_CLONE_SUITE Clone_baseline
#define cpu cpu_baseline
#include "csrc/tests/test_kernels_clones.h"
