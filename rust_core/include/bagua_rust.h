/* The C ABI of bagua's ordering core (rust_core/src/ffi.rs): the bucket planner, the step, the topologies and the
 * simulator.
 *
 * Every function returns 0 or a BaguaRustCode, and writes the same number and a message to `error`.
 * No pointer may be null unless its description says so; a null one is BAGUA_RUST_NULL_POINTER (if
 * `error` itself is null, only the return value says so). On an error no output is written, unless
 * said otherwise. Pointers must be aligned, and arrays as long as the length passed with them; all
 * arrays stay the caller's and are not kept. An array may be null if its length is 0. A handle is freed
 * once and not used afterwards. Calls on one handle must not overlap; no call blocks or starts a thread. */
#ifndef BAGUA_RUST_H_
#define BAGUA_RUST_H_

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Stable: a number never changes its meaning, and is not used again (8 is retired). 1 to 99 are the caller's mistakes,
 * from 100 bugs of bagua. */
typedef enum BaguaRustCode {
  BAGUA_RUST_OK = 0,
  BAGUA_RUST_NULL_POINTER = 1,         /* a pointer was null */
  BAGUA_RUST_INVALID_ORDER = 2,        /* order is not a permutation of the tensor indices */
  BAGUA_RUST_INVALID_ALIGNMENT = 3,    /* align_bytes is not a power of two, or no multiple of an item size */
  BAGUA_RUST_INVALID_BUCKET_BYTES = 4, /* bucket_bytes or small_bucket_bytes is 0 */
  BAGUA_RUST_INVALID_ITEM_BYTES = 5,   /* an item size is 0, or differs within one key */
  BAGUA_RUST_OVERFLOW = 6,             /* a size passes 64 bits, or an array cannot exist */
  BAGUA_RUST_TENSOR_OUT_OF_RANGE = 7,  /* no tensor of that index */
  BAGUA_RUST_ALREADY_READY = 9,        /* the tensor was marked ready before in this step */
  BAGUA_RUST_STEP_NOT_STARTED = 10,    /* no step is open */
  BAGUA_RUST_BUFFER_TOO_SMALL = 11,    /* the output array is too short */
  BAGUA_RUST_TOPOLOGY_OUT_OF_RANGE = 12, /* no topology of that number */
  BAGUA_RUST_RANK_OUT_OF_RANGE = 13,   /* the rank is not below the number of ranks */
  BAGUA_RUST_INVALID_BUCKETS = 14,     /* the tensors' buckets are not 0, 1, ... with at least one tensor each */
  BAGUA_RUST_NOT_LAID_OUT = 15,        /* no buckets are laid out yet */
  BAGUA_RUST_STEP_OPEN = 16,           /* a step is open, but the call needs it closed */
  BAGUA_RUST_NOT_STARTED_LAST = 17,    /* the bucket is not the one that was launched or resumed last */
  BAGUA_RUST_INVALID_NETWORK = 18,     /* a network or its ranks have a value that is out of range */
  BAGUA_RUST_INVALID_PROGRAM = 19,     /* what an operation or a program does makes no sense */
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
  uint64_t small_bucket_bytes; /* the minimum cap of a bucket; if bucket_bytes is smaller, that is the minimum */
  uint64_t bucket_bytes;       /* the maximum cap of a bucket, padding included */
  uint64_t align_bytes;        /* a power of two and a multiple of every item size */
} BaguaPlanOptions;

typedef struct BaguaNeighbor {
  uint64_t rank;
  double weight;  /* of its values in this rank's average; 0 if they are not received */
  bool is_source; /* true if its values are received; false for the own rank */
  bool is_target; /* true if this rank's values are sent to it; false for the own rank */
} BaguaNeighbor;

/* One thing that a rehearsed operation did: csrc/communicator/rehearsal.h. */
typedef struct BaguaRehearsedStep {
  uint32_t kind;   /* 0: a message was sent, 1: received, 2: waited for, 3: the operation ended */
  int32_t peer;    /* the other rank of a message */
  uint64_t bytes;  /* the length of a message */
  uint64_t about;  /* of a message the step of the one in whose place it stands, of a wait that of the message; or ~0 */
  int64_t busy_ns; /* processor time since the step before */
} BaguaRehearsedStep;

typedef struct BaguaNetwork {
  uint64_t size;
  uint64_t ranks_per_host; /* consecutive ranks */
  double up;               /* bytes per second that a host's link carries out */
  double down;             /* and in */
  double latency;          /* seconds from the last byte on the link to the arrival */
  double local;            /* bytes per second between the ranks of one host, all together */
  double per_message;      /* seconds of processor time of each message, at either end */
  double slowdown;         /* how many times as long the ranks compute as the one that rehearsed */
} BaguaNetwork;

typedef struct BaguaCost {
  double seconds;
  double busy;       /* the part that is processor time */
  double link_bytes; /* that a host's link carries out */
} BaguaCost;

typedef struct BaguaEntry {
  uint32_t action;    /* 0: the thread computes, 1: starts an operation, 2: waits for it, 3: a training step ends,
                         4: the device begins with new work, 5: the thread waits for so much more of it */
  uint32_t operation; /* of 1 and 2 */
  double seconds;     /* of 0 and 5 */
} BaguaEntry;

typedef struct BaguaOperation {
  double seconds;    /* from the begin of the last that takes part to the end */
  uint32_t topology; /* whose neighbours exchange; ~0 for all ranks */
  uint64_t step;     /* of the topology */
  double link_bytes; /* that the link of a rank's host carries */
  double busy;       /* processor time in it, which no link shortens */
} BaguaOperation;

typedef struct BaguaConditions {
  double sigma;      /* standard deviation of the logarithm of a factor that each rank draws in each step */
  uint64_t seed;
  uint64_t slow_rank;
  double slow_factor; /* how many times as long that rank computes */
  double rate;        /* bytes per second of a link */
  double burst;       /* bytes that an idle link saves up at that rate, and carries at once later */
} BaguaConditions;

/* The next action for the caller; those up to WAIT concern one bucket. */
typedef enum BaguaDecision {
  BAGUA_NOTHING = 0,        /* no decision now; there may be one after the next event */
  BAGUA_LAUNCH = 1,         /* start the bucket's communication */
  BAGUA_RESUME = 2,         /* continue the communication of the bucket, which was suspended */
  BAGUA_WAIT = 3,           /* wait until the bucket's communication is complete */
  BAGUA_AGREE_ON_USE = 4,   /* start the message by which ranks agree on the tensors that were used */
  BAGUA_FINALIZE_USE = 5,   /* apply the result of that message */
  BAGUA_SEND_BUFFERS = 6,   /* start the message with rank 0's buffers */
  BAGUA_AGREE_ON_ORDER = 7  /* agree with them on rank 0's observed order, and call bagua_step_agree */
} BaguaDecision;

/* The outcome of a backward's computation. */
typedef enum BaguaOutcome {
  BAGUA_UNTOUCHED = 0,  /* no tensor became ready, so the backward was not this model's; the step is dropped */
  BAGUA_INCOMPLETE = 1, /* some tensors never became ready, and all must; the step is dropped */
  BAGUA_COMPLETE = 2    /* there are decisions to take */
} BaguaOutcome;

/* The value of *out_num if there is no list, which differs from an empty list. */
#define BAGUA_NO_LIST UINT64_MAX

typedef struct BaguaStep BaguaStep; /* the steps of one wrapped model, one after the other */

/* Lays num_tensors tensors out in buckets. `order` (order_len == num_tensors entries) is the order in which they are
 * expected to become ready, first = ready first. By tensor, out_bucket becomes its bucket and out_offset_numel its
 * first element in there; by bucket, out_bucket_numel becomes its elements, padding included. The three have room for
 * num_tensors entries. *out_num_buckets becomes the number of buckets; they are numbered in launch order and have
 * at least one tensor each. In one bucket the tensor that comes earlier in `order` has the lower offset. Pure: the
 * same arguments give the same plan on every rank.
 * Errors: INVALID_ORDER, INVALID_ALIGNMENT, INVALID_BUCKET_BYTES, INVALID_ITEM_BYTES, OVERFLOW. */
int32_t bagua_plan(const BaguaTensorSpec* tensors, uint64_t num_tensors, const uint64_t* order, uint64_t order_len,
                   const BaguaPlanOptions* options, uint64_t* out_bucket, uint64_t* out_offset_numel,
                   uint64_t* out_bucket_numel, uint64_t* out_num_buckets, BaguaRustError* error);

/* The step machine: events in, decisions out. The order of everything that ranks must do together depends on the
 * layout, the stage and the decisions at which buckets were suspended, not on the order of this rank's events. After an
 * error the state is unchanged. From begin to the last decision nothing is allocated. */

/* *out_step becomes a new handle, the caller's to free, for num_tensors tensors, without a layout and in a stage that
 * launches. With finds_unused, a backward may leave tensors unused. Errors: OVERFLOW. */
int32_t bagua_step_new(uint64_t num_tensors, bool finds_unused, BaguaStep** out_step, BaguaRustError* error);

/* Frees the handle. */
int32_t bagua_step_free(BaguaStep* step, BaguaRustError* error);

/* Sets a new layout: the bucket of each tensor, as bagua_plan numbers them, and the ready order for which it was made.
 * The agreed order is kept; the rest of a finished step is dropped.
 * Errors: STEP_OPEN, INVALID_BUCKETS, INVALID_ORDER. */
int32_t bagua_step_lay_out(BaguaStep* step, const uint64_t* bucket_of, uint64_t bucket_of_len, const uint64_t* order,
                           uint64_t order_len, BaguaRustError* error);

/* The algorithm is in `stage` now. launches: gradients are exchanged, in backward; otherwise nothing is launched and
 * no order is agreed on. *out_is_new: whether stage or launches has changed, or this is the first call, so that the
 * buckets are to be laid out anew.
 * Errors: STEP_OPEN, where one of the two has changed. */
int32_t bagua_step_set_stage(BaguaStep* step, int64_t stage, bool launches, bool* out_is_new, BaguaRustError* error);

/* Opens a step: no tensor ready, no bucket launched. One that is open (its backward raised), or has decisions left, is
 * dropped. Errors: NOT_LAID_OUT. */
int32_t bagua_step_begin(BaguaStep* step, BaguaRustError* error);

/* Marks a tensor's gradient as ready. *out_has_decision becomes true if bagua_step_next has a decision.
 * Errors: STEP_NOT_STARTED, TENSOR_OUT_OF_RANGE, ALREADY_READY. */
int32_t bagua_step_ready(BaguaStep* step, uint64_t tensor, bool* out_has_decision, BaguaRustError* error);

/* Takes the next decision: *out_decision becomes a BaguaDecision, *out_bucket the bucket that is meant, or 0. Where
 * the stage launches: a bucket is launched once all its tensors are ready and all buckets before it are launched. After
 * finish come the launches that are left, SEND_BUFFERS, AGREE_ON_USE (if the step finds unused tensors), the
 * resumptions that are left, a WAIT for each bucket, FINALIZE_USE (likewise) and AGREE_ON_ORDER (while no order is
 * agreed). Where the stage does not launch: after finish SEND_BUFFERS alone. */
int32_t bagua_step_next(BaguaStep* step, uint32_t* out_decision, uint64_t* out_bucket, BaguaRustError* error);

/* Suspends the communication of the bucket that was launched or resumed last. It is resumed after two more launches,
 * before the next one, or at the end of backward, whichever is first; of several buckets, the one that was suspended
 * first. Errors: NOT_STARTED_LAST. */
int32_t bagua_step_suspended(BaguaStep* step, uint64_t bucket, BaguaRustError* error);

/* Ends backward's computation: *out_outcome becomes a BaguaOutcome. The step is no longer open.
 * Errors: STEP_NOT_STARTED. */
int32_t bagua_step_finish(BaguaStep* step, uint32_t* out_outcome, BaguaRustError* error);

/* Drops the step, if there is one, because backward raised. */
int32_t bagua_step_abort(BaguaStep* step, BaguaRustError* error);

/* Sets the ready order on which the ranks have agreed. Errors: INVALID_ORDER. */
int32_t bagua_step_agree(BaguaStep* step, const uint64_t* order, uint64_t order_len, BaguaRustError* error);

/* Writes true if a step is open (from begin to finish or abort), and the number of buckets launched in it, or in the
 * last one. */
int32_t bagua_step_state(const BaguaStep* step, bool* out_is_open, uint64_t* out_num_launched, BaguaRustError* error);

/* The following four write a list of tensors to out_tensors and its length to *out_num. `capacity` of the number of
 * tensors always suffices. Errors: BUFFER_TOO_SMALL, and *out_num is the capacity needed. */

/* The tensors that are not ready, ascending; after the step's end those that never became ready; before the first
 * step, all. */
int32_t bagua_step_missing(const BaguaStep* step, uint64_t* out_tensors, uint64_t capacity, uint64_t* out_num,
                           BaguaRustError* error);

/* All tensors, in the order in which they became ready in the last complete step, followed by the others in the
 * layout's order; in a new layout, in its order. */
int32_t bagua_step_observed_order(const BaguaStep* step, uint64_t* out_tensors, uint64_t capacity, uint64_t* out_num,
                                  BaguaRustError* error);

/* The order of the last call of bagua_step_agree; NO_LIST before. */
int32_t bagua_step_agreed_order(const BaguaStep* step, uint64_t* out_tensors, uint64_t capacity, uint64_t* out_num,
                                BaguaRustError* error);

/* The agreed order if the buckets are not laid out for it; else NO_LIST. */
int32_t bagua_step_layout_due(const BaguaStep* step, uint64_t* out_tensors, uint64_t capacity, uint64_t* out_num,
                              BaguaRustError* error);

/* Writes the name of a topology, NUL-terminated. Topologies are numbered 0, 1, ...; the first number that is
 * TOPOLOGY_OUT_OF_RANGE is the number of topologies. Errors: TOPOLOGY_OUT_OF_RANGE, BUFFER_TOO_SMALL. */
int32_t bagua_topology_name(uint32_t topology, char* out_name, uint64_t capacity, BaguaRustError* error);

/* Writes the ranks that `rank` of `size` ranks averages with at `step`, itself included, ascending, to out_neighbors,
 * and their number to *out_num. Their weights add up to 1, and so do the weights that all ranks give to one rank.
 * `capacity` of `size` always suffices. Pure.
 * Errors: TOPOLOGY_OUT_OF_RANGE, RANK_OUT_OF_RANGE, BUFFER_TOO_SMALL, and *out_num is the capacity needed. */
int32_t bagua_topology_neighbors(uint32_t topology, uint64_t size, uint64_t rank, uint64_t step,
                                 BaguaNeighbor* out_neighbors, uint64_t capacity, uint64_t* out_num,
                                 BaguaRustError* error);

/* The cost of a rehearsed operation of `rank` on a network. Pure.
 * Errors: INVALID_NETWORK, INVALID_PROGRAM, RANK_OUT_OF_RANGE. */
int32_t bagua_rehearsed_cost(const BaguaRehearsedStep* steps, uint64_t num_steps, uint64_t rank,
                             const BaguaNetwork* network, BaguaCost* out_cost, BaguaRustError* error);

/* Plays the program of every rank's thread in virtual time, from 0 s. Writes, step by step and rank by rank, when the
 * training steps ended and how long the thread waited in each; operation by operation and rank by rank, when the
 * operations began and ended. The lengths are steps x size and operations x size. Pure.
 * Errors: INVALID_NETWORK, INVALID_PROGRAM, RANK_OUT_OF_RANGE (no rank, or slow_rank), TOPOLOGY_OUT_OF_RANGE, BUFFER_TOO_SMALL. */
int32_t bagua_play(const BaguaEntry* program, uint64_t num_entries, const BaguaOperation* operations,
                   uint64_t num_operations, uint64_t size, const BaguaConditions* conditions, double* out_step_ends,
                   double* out_waited, uint64_t num_step_ends, double* out_begins, double* out_ends, uint64_t num_ends,
                   BaguaRustError* error);

#ifdef __cplusplus
}
#endif

#endif /* BAGUA_RUST_H_ */
