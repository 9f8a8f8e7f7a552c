// A library that says it is NCCL, of a version that will do, and has nothing else: what is said about it is tested.
extern "C" __attribute__((visibility("default"))) int ncclGetVersion(int* version) {
  *version = 22703;
  return 0;
}
