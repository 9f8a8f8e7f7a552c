// The table of codecs: filled by the static initialisers of the codec files while the module loads, read
// by every rank's threads afterwards.
#include <map>
#include <mutex>
#include <utility>

#include "csrc/codecs/codec.h"
#include "csrc/common/error.h"

namespace bagua {
namespace {

struct Entry {
  CodecFactory factory;
  std::unique_ptr<Codec> instance;  // made on first use, then never replaced
};

struct Registry {
  std::mutex mutex;  // guards entries
  std::map<std::string, Entry, std::less<>> entries;
};

// A function's static, because codec files may initialise before this one. Never destroyed, because
// engine threads may still hold a codec while the process exits.
Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

}  // namespace

bool register_codec(std::string_view name, CodecFactory factory) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const bool inserted = all.entries.try_emplace(std::string(name), Entry{std::move(factory), nullptr}).second;
  if (!inserted) {
    throw Error(ErrorKind::kInternal, "codec \"" + std::string(name) +
                                          "\" is registered twice; every codec file registers one name of its own");
  }
  return true;
}

const Codec& get_codec(std::string_view name) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.entries.find(name);
  if (found == all.entries.end()) {
    std::string known;
    for (const auto& [registered, entry] : all.entries) known += (known.empty() ? "" : ", ") + registered;
    throw Error(ErrorKind::kInvalidArgument,
                "unknown codec \"" + std::string(name) + "\"; the registered codecs are: " + known);
  }
  Entry& entry = found->second;
  if (entry.instance == nullptr) entry.instance = entry.factory();
  return *entry.instance;
}

std::vector<std::string> registered_codecs() {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::vector<std::string> names;
  for (const auto& [name, entry] : all.entries) names.push_back(name);
  return names;
}

}  // namespace bagua
