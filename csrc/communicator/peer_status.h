// PeerStatus: what a rank is doing, as it tells a peer of a group that asks why it is kept waiting. Testimony: what a
// process tells another one of a third. Both travel as they lie in memory.
#pragma once

#include <array>
#include <cstdint>

#include "csrc/common/operation.h"

namespace bagua {

// The end of a chain of ranks that wait for one another, as far as a rank knows: a rank that asks along a chain finds
// out whom to name. Ranks are the job's, since a chain may lead through several groups.
struct ChainEnd {
  enum State : uint32_t {
    kUnknown,       // no rank has told yet
    kIsNotWaiting,  // it is there, and waits for no rank
    kHasNoGroup,    // nor has it made the group (yet) in which the witness waits for it
    kDoesNotAnswer,
    kUnreachable,   // nor does its host acknowledge what is sent to it
    kHasLeftGroup,  // it has destroyed the group in which the witness waits for it
  };
  int32_t rank = -1;
  int32_t witness = -1;  // who waits for it
  State state = kUnknown;
  uint32_t silent_ms = 0;  // for how long it has not answered the witness
  uint32_t age_ms = 0;     // how old all this is
  uint32_t padding = 0;
  Operation operation;  // of a rank that is not waiting
  Operation last_finished;
};

// The operation of a rank, as told to a peer that asks why it is kept waiting.
struct PeerStatus {
  Operation operation;        // kNone when idle
  Operation last_finished;    // kNone before the first
  int32_t waiting_for = -1;   // in this group
  uint32_t elsewhere_ms = 0;  // it waits in another group, for so long; which, and in what, stands in the next two
  Operation elsewhere;        // kNone: for a message
  std::array<char, 64> elsewhere_group{};  // ends with a 0; long names are cut
  ChainEnd end;                            // of the chain that begins with this rank
  // The state of the group that the request is about. A rank that does not have it waits, if at all, elsewhere, and
  // leaves to who asks to say whose status this is (`end`).
  enum Group : uint32_t { kHasMade, kHasNotMade, kHasLeft };
  Group group = kHasMade;
  uint32_t padding = 0;
};

// A question to a peer beside what it does.
struct StatusRequest {
  uint32_t hops = 0;  // along how many more ranks it asks, each whom it waits for
};

// Whether a process hears from another one.
enum class Hearing : uint32_t { kCannotTell, kNotYetKnown, kHears, kHearsNothing };

// A question to a process for all groups at once: whether it hears from a rank of the job. About no rank: that it
// answers is what matters.
struct Inquiry {
  int32_t about = -1;
};
struct Testimony {
  int32_t about = -1;  // the inquiry's
  Hearing hearing = Hearing::kCannotTell;
};

// Throws an InvalidArgument that shows both sides when a peer is doing, or has just done, another operation than this
// rank under the same number.
void check_status(const PeerStatus& theirs, const PeerStatus& mine, int peer);

}  // namespace bagua
