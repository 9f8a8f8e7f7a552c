/* The C ABI of bagua's ordering core (rust_core/src/ffi.rs): the bucket planner, the scheduler and the
 * topologies.
 *
 * Every function returns 0 or a BaguaRustCode, and writes the same number and a message to `error`.
 * No pointer may be null unless its description says so; a null one is BAGUA_RUST_NULL_POINTER (if
 * `error` itself is null, only the return value says so). On an error no output is written, unless
 * said otherwise. Pointers must be aligned, and arrays as long as the length passed with them; all
 * arrays stay the caller's and are not kept. A handle is freed once, by its `_free`, and not used
 * after that. Calls on one handle must not overlap; nothing blocks, and nothing here starts a thread. */
#ifndef BAGUA_RUST_H_
#define BAGUA_RUST_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Stable: a number never changes its meaning. 1 to 99 are the caller's mistakes, from 100 bugs of bagua. */
typedef enum BaguaRustCode {
  BAGUA_RUST_OK = 0,
  BAGUA_RUST_NULL_POINTER = 1,         /* a pointer was null */
  BAGUA_RUST_INVALID_ORDER = 2,        /* order is not a permutation of the tensor indices */
  BAGUA_RUST_INVALID_ALIGNMENT = 3,    /* align_bytes is not a power of two, or no multiple of an item size */
  BAGUA_RUST_INVALID_BUCKET_BYTES = 4, /* bucket_bytes or small_bucket_bytes is 0 */
  BAGUA_RUST_INVALID_ITEM_BYTES = 5,   /* an item size is 0, or differs within one key */
  BAGUA_RUST_OVERFLOW = 6,             /* a size passes 64 bits, or an array cannot exist */
  BAGUA_RUST_TENSOR_OUT_OF_RANGE = 7,  /* no tensor of that index */
  BAGUA_RUST_BUCKET_OUT_OF_RANGE = 8,  /* no bucket of that index */
  BAGUA_RUST_ALREADY_READY = 9,        /* the tensor was marked ready before in this step */
  BAGUA_RUST_STEP_NOT_STARTED = 10,    /* no step is under way */
  BAGUA_RUST_BUFFER_TOO_SMALL = 11,    /* the output array is too short */
  BAGUA_RUST_TOPOLOGY_OUT_OF_RANGE = 12, /* no topology of that number */
  BAGUA_RUST_RANK_OUT_OF_RANGE = 13,   /* the rank is not below the number of ranks */
  BAGUA_RUST_INTERNAL = 100            /* a panic was caught; free the handle */
} BaguaRustCode;

typedef struct BaguaRustError {
  int32_t code;      /* a BaguaRustCode */
  char message[256]; /* UTF-8, cut at a character boundary, always NUL-terminated; "" on success */
} BaguaRustError;

typedef struct BaguaTensorSpec {
  uint64_t numel;      /* elements; 0 is legal */
  uint64_t key;        /* opaque class; tensors of different keys never share a bucket */
  uint32_t item_bytes; /* bytes of one element; the same for all tensors of a key */
} BaguaTensorSpec;

typedef struct BaguaPlanOptions {
  uint64_t small_bucket_bytes; /* what no bucket's cap goes below; never raises one above bucket_bytes */
  uint64_t bucket_bytes;       /* what no bucket's cap goes above, padding included */
  uint64_t align_bytes;        /* a power of two and a multiple of every item size */
} BaguaPlanOptions;

typedef struct BaguaBucketInfo {
  uint64_t key;
  uint64_t numel;       /* elements, padding included; 0 if no member has elements */
  uint64_t num_members; /* at least 1 */
  uint32_t item_bytes;
} BaguaBucketInfo;

typedef struct BaguaBucketMember {
  uint64_t tensor;       /* index into the tensors that were planned */
  uint64_t offset_numel; /* first element inside the bucket */
  uint64_t numel;        /* elements, padding not included */
} BaguaBucketMember;

typedef struct BaguaBucketRange {
  uint64_t first; /* buckets first, first + 1, ..., last - 1, in this order; none if first == last */
  uint64_t last;
} BaguaBucketRange;

typedef struct BaguaNeighbor {
  uint64_t rank;
  double weight;      /* of its values in this rank's average; 0 if they are not received */
  uint32_t is_source; /* 1 if its values are received; 0 for the own rank */
  uint32_t is_target; /* 1 if it is sent this rank's values; 0 for the own rank */
} BaguaNeighbor;

typedef struct BaguaPlan BaguaPlan;           /* immutable */
typedef struct BaguaScheduler BaguaScheduler; /* the steps of one wrapped model */

/* Lays num_tensors tensors out in buckets. `order` (order_len == num_tensors entries) is the order in which they
 * are expected to become ready, first = ready first. tensors and order may be null if there are none. *out_plan
 * becomes a new handle, the caller's to free. Pure: the same arguments give the same plan on every rank.
 * Errors: INVALID_ORDER, INVALID_ALIGNMENT, INVALID_BUCKET_BYTES, INVALID_ITEM_BYTES, OVERFLOW. */
int32_t bagua_plan_new(const BaguaTensorSpec* tensors, uint64_t num_tensors, const uint64_t* order, uint64_t order_len,
                       const BaguaPlanOptions* options, BaguaPlan** out_plan, BaguaRustError* error);

/* Frees the plan. Schedulers made from it stay valid. */
int32_t bagua_plan_free(BaguaPlan* plan, BaguaRustError* error);

/* Writes the number of buckets. Buckets are numbered from 0 in launch order. */
int32_t bagua_plan_num_buckets(const BaguaPlan* plan, uint64_t* out_num_buckets, BaguaRustError* error);

/* Describes one bucket. Errors: BUCKET_OUT_OF_RANGE. */
int32_t bagua_plan_bucket(const BaguaPlan* plan, uint64_t bucket, BaguaBucketInfo* out_info, BaguaRustError* error);

/* Writes the bucket's num_members members, in the order in which they are expected to become ready, to out_members,
 * which has room for `capacity`. Errors: BUCKET_OUT_OF_RANGE, BUFFER_TOO_SMALL. */
int32_t bagua_plan_bucket_members(const BaguaPlan* plan, uint64_t bucket, BaguaBucketMember* out_members,
                                  uint64_t capacity, BaguaRustError* error);

/* Makes a scheduler, outside a step. *out_scheduler becomes a new handle, the caller's to free; the plan is copied
 * from, not kept. */
int32_t bagua_scheduler_new(const BaguaPlan* plan, BaguaScheduler** out_scheduler, BaguaRustError* error);

/* Frees the scheduler. */
int32_t bagua_scheduler_free(BaguaScheduler* scheduler, BaguaRustError* error);

/* Starts a step: no tensor ready, no bucket launched. Legal in the middle of a step (its backward raised), which is
 * then dropped. */
int32_t bagua_scheduler_begin_step(BaguaScheduler* scheduler, BaguaRustError* error);

/* Marks a tensor ready and writes the buckets to launch now, often none. A bucket is launched once all its members
 * are ready and all buckets before it are launched, so the sequence is the plan's on every rank. Allocates nothing.
 * Errors, which leave the step as it was: STEP_NOT_STARTED, TENSOR_OUT_OF_RANGE, ALREADY_READY. */
int32_t bagua_scheduler_mark_ready(BaguaScheduler* scheduler, uint64_t tensor, BaguaBucketRange* out_range,
                                   BaguaRustError* error);

/* Ends the step and writes the buckets not launched yet, which count as launched.
 * Errors: STEP_NOT_STARTED. */
int32_t bagua_scheduler_finish(BaguaScheduler* scheduler, BaguaBucketRange* out_range, BaguaRustError* error);

/* Writes the tensors that are not ready, ascending, to out_tensors, and their number to *out_num. `capacity` of the
 * number of tensors always suffices; out_tensors may be null if there is nothing to write. After finish: those that
 * never became ready; before the first step: all. Errors: BUFFER_TOO_SMALL, and *out_num is the capacity needed. */
int32_t bagua_scheduler_missing(const BaguaScheduler* scheduler, uint64_t* out_tensors, uint64_t capacity,
                                uint64_t* out_num, BaguaRustError* error);

/* Writes all tensors, in the order in which they became ready in the last complete step, those that did not in plan
 * order behind them; before the first complete step, in plan order. A step is complete when all tensors are ready or
 * finish was called. out_tensors may be null if there are no tensors. Errors: BUFFER_TOO_SMALL. */
int32_t bagua_scheduler_observed_order(const BaguaScheduler* scheduler, uint64_t* out_tensors, uint64_t capacity,
                                       BaguaRustError* error);

/* Writes the name of a topology, NUL-terminated. Topologies are numbered 0, 1, ...; the first number that is
 * TOPOLOGY_OUT_OF_RANGE is how many there are. Errors: TOPOLOGY_OUT_OF_RANGE, BUFFER_TOO_SMALL. */
int32_t bagua_topology_name(uint32_t topology, char* out_name, uint64_t capacity, BaguaRustError* error);

/* Writes the ranks that `rank` of `size` ranks averages with at `step`, ascending and with the own one, to
 * out_neighbors, and their number to *out_num. Their weights add up to 1, and so do over all ranks the weights given
 * to one rank. `capacity` of `size` always suffices. Pure.
 * Errors: TOPOLOGY_OUT_OF_RANGE, RANK_OUT_OF_RANGE, BUFFER_TOO_SMALL, and *out_num is the capacity needed. */
int32_t bagua_topology_neighbors(uint32_t topology, uint64_t size, uint64_t rank, uint64_t step,
                                 BaguaNeighbor* out_neighbors, uint64_t capacity, uint64_t* out_num,
                                 BaguaRustError* error);

#ifdef __cplusplus
}
#endif

#endif /* BAGUA_RUST_H_ */
