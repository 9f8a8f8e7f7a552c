// The table of codecs: filled by the static initialisers of the codec files while the module loads, read
// by every rank's threads afterwards.
#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "csrc/codecs/codec.h"
#include "csrc/common/error.h"

namespace bagua {
namespace {

struct Registry {
  std::mutex mutex;  // guards the two below
  std::map<std::string, CodecFactory, std::less<>> factories;
  std::map<std::string, std::unique_ptr<Codec>, std::less<>> instances;  // by spec; made on first use, never replaced
};

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

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
  const bool inserted = all.factories.try_emplace(std::string(name), std::move(factory)).second;
  if (!inserted) {
    throw Error(ErrorKind::kInternal, "codec \"" + std::string(name) +
                                          "\" is registered twice; every codec file registers one name of its own");
  }
  return true;
}

const Codec& get_codec(std::string_view spec) {
  const std::vector<std::string> names = registered_codecs();
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto made = all.instances.find(spec);
  if (made != all.instances.end()) return *made->second;
  CodecOptions options(spec);
  const auto found = all.factories.find(options.name());
  if (found == all.factories.end()) {
    throw Error(ErrorKind::kInvalidArgument,
                "unknown codec \"" + options.name() + "\"; the registered codecs are: " + joined(names));
  }
  auto codec = found->second(options);
  options.check_all_known();
  return *all.instances.emplace(std::string(spec), std::move(codec)).first->second;
}

std::vector<std::string> registered_codecs() {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::vector<std::string> names;
  for (const auto& [name, factory] : all.factories) names.push_back(name);
  return names;
}

CodecOptions::CodecOptions(std::string_view spec) : name_(spec.substr(0, spec.find(':'))) {
  while (spec.find_first_of(":,") != std::string_view::npos) {
    spec.remove_prefix(spec.find_first_of(":,") + 1);
    const std::string_view one = spec.substr(0, spec.find(','));
    const size_t equals = one.find('=');
    if (equals == std::string_view::npos) {
      throw Error(ErrorKind::kInvalidArgument, "codec \"" + name_ + "\" has the option \"" + std::string(one) +
                                                   "\"; options are given as name:option=value,option=value");
    }
    values_[std::string(one.substr(0, equals))] = one.substr(equals + 1);
  }
}

int CodecOptions::one_of(std::string_view option, std::initializer_list<int> allowed) {
  known_.emplace_back(option);
  const auto given = values_.find(option);
  if (given == values_.end()) return *allowed.begin();
  std::vector<std::string> texts;
  for (const int value : allowed) {
    texts.push_back(std::to_string(value));
    if (given->second == texts.back()) return value;
  }
  throw Error(ErrorKind::kInvalidArgument, "codec \"" + name_ + "\": " + std::string(option) + " is " + given->second +
                                               ", expected one of " + joined(texts));
}

void CodecOptions::check_all_known() const {
  for (const auto& [option, value] : values_) {
    if (std::find(known_.begin(), known_.end(), option) != known_.end()) continue;
    throw Error(ErrorKind::kInvalidArgument,
                "codec \"" + name_ + "\" has no option \"" + option + "\"" +
                    (known_.empty() ? "; it has none" : "; its options are: " + joined(known_)));
  }
}

}  // namespace bagua
