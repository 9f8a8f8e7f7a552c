// Exchange of addresses; see shared_buffers.h.
#include "csrc/collectives/shared_buffers.h"

#include "csrc/collectives/algorithms.h"
#include "csrc/collectives/posted_requests.h"

namespace bagua::collectives {
namespace {

// On the wire between ranks of one host.
struct AddressNote {
  Address buffer;
  Address staging;
  uint64_t shares_buffer = 0;
};
static_assert(sizeof(AddressNote) == 40);

AddressNote my_note(const GroupView& group, const void* buffer, size_t bytes, const void* staging,
                    size_t staging_bytes) {
  AddressNote note;
  if (const auto address = group.address_of(buffer, bytes)) {
    note.buffer = *address;
    note.shares_buffer = 1;
  }
  if (staging != nullptr) {
    const auto address = group.address_of(staging, staging_bytes);
    if (!address)
      throw Error(ErrorKind::kInternal, "the staging memory of a communicator does not lie in a shared segment");
    note.staging = *address;
  }
  return note;
}

void exchange_notes(const GroupView& group, AddressNote* notes) {
  PostedRequests requests(group, 2 * static_cast<size_t>(group.size()));
  const int rank = group.rank();
  for (int peer = 0; peer < group.size(); ++peer) {
    if (peer == rank) continue;
    const size_t slot = 2 * static_cast<size_t>(peer);
    requests.recv(slot, peer, &notes[peer], sizeof(AddressNote));
    requests.send(slot + 1, peer, &notes[rank], sizeof(AddressNote));
  }
  requests.wait_all();
}

}  // namespace

SharedBuffers exchange_buffers(Context& context, const void* buffer, size_t bytes, void* staging,
                               size_t staging_bytes) {
  const GroupView& group = context.group;
  const auto size = static_cast<size_t>(group.size());
  const size_t row_bytes = sizeof(AddressNote) + 3 * sizeof(void*);
  // The workspace is aligned for any of these; each table's bytes are a multiple of eight.
  uint8_t* tables = host_tables(context, size * row_bytes);
  auto* notes = reinterpret_cast<AddressNote*>(tables);
  uint8_t* pointers = tables + size * sizeof(AddressNote);
  SharedBuffers shared;
  shared.at = reinterpret_cast<uint8_t**>(pointers);
  shared.sources = reinterpret_cast<const void**>(pointers + size * sizeof(void*));
  shared.destinations = reinterpret_cast<void**>(pointers + 2 * size * sizeof(void*));

  notes[group.rank()] = my_note(group, buffer, bytes, staging, staging_bytes);
  exchange_notes(group, notes);
  bool all_shared = true;
  for (size_t r = 0; r < size; ++r) all_shared = all_shared && notes[r].shares_buffer != 0;
  if (!all_shared && staging == nullptr) return shared;

  shared.sharing = all_shared ? Sharing::kBuffers : Sharing::kStaging;
  for (int peer = 0; peer < group.size(); ++peer) {
    const AddressNote& note = notes[peer];
    if (peer == group.rank()) {
      // const_cast: callers write through `at` only where they passed a writable buffer.
      shared.at[peer] = static_cast<uint8_t*>(all_shared ? const_cast<void*>(buffer) : staging);
    } else {
      shared.at[peer] = static_cast<uint8_t*>(all_shared ? group.resolve(peer, note.buffer, bytes)
                                                         : group.resolve(peer, note.staging, staging_bytes));
    }
  }
  return shared;
}

}  // namespace bagua::collectives
