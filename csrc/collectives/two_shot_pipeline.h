// The order in which the two-shot collectives post their messages: round k's contributions (A_k, to the
// owners of the stripes) and results (B_k, from them) as A0 A1 B0 A2 B1 ... B_last. All ranks use this
// order on all channels, so messages meet without tags, and while round k is reduced, round k+1 travels.
#pragma once

#include <cstddef>

namespace bagua::collectives {

// At most this many rounds have messages or workspace under way.
inline constexpr size_t kRoundsInFlight = 2;

// `rounds` has post_contributions(k), reduce(k) (waits for the contributions), post_results(k) and
// take_results(k) (waits for the results).
template <typename Rounds>
void run_two_shot(size_t count, Rounds& rounds) {
  if (count == 0) return;
  rounds.post_contributions(0);
  for (size_t k = 0; k < count; ++k) {
    if (k + 1 < count) rounds.post_contributions(k + 1);
    rounds.reduce(k);
    rounds.post_results(k);
    if (k > 0) rounds.take_results(k - 1);
  }
  rounds.take_results(count - 1);
}

}  // namespace bagua::collectives
