// The table of codecs: filled by the static initialisers of the codec files while the module loads, read
// by every rank's threads afterwards. The numbers count the variants of the first of the sorted names, then those of
// the second, and so on, from 1.
#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "csrc/codecs/codec.h"
#include "csrc/common/error.h"

namespace bagua {
namespace {

constexpr size_t kMaxNumber = 255;  // fits in a byte

struct Entry {
  CodecFactory factory;
  std::vector<std::string> specs;  // by variant
};

struct Registry {
  std::mutex mutex;  // guards the two below
  std::map<std::string, Entry, std::less<>> entries;
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

[[noreturn]] void reject_registration(std::string_view name, const std::string& reason) {
  throw Error(ErrorKind::kInternal, "codec \"" + std::string(name) + "\" " + reason);
}

// The specs of all combinations of options that the factory accepts, by variant.
std::vector<std::string> specs_by_variant(std::string_view name, const CodecFactory& factory) {
  CodecOptions defaults(name);
  factory(defaults);
  std::vector<std::pair<std::string, int>> found;
  for (const std::string& spec : defaults.all_specs()) {
    try {
      CodecOptions options(spec);
      found.emplace_back(spec, factory(options)->variant());
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kInvalidArgument) throw;
    }
  }
  std::vector<std::string> specs(found.size());
  for (const auto& [spec, variant] : found) {
    if (variant < 0 || variant >= static_cast<int>(specs.size())) {
      reject_registration(name, "has variant " + std::to_string(variant) + " as " + spec + ", expected 0 to " +
                                    std::to_string(specs.size() - 1));
    }
    std::string& other = specs[static_cast<size_t>(variant)];
    if (!other.empty()) {
      reject_registration(name, "has variant " + std::to_string(variant) + " as " + other + " and as " + spec +
                                    ", which ranks could not tell apart");
    }
    other = spec;
  }
  return specs;
}

}  // namespace

bool register_codec(std::string_view name, CodecFactory factory) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.entries.contains(name)) {
    reject_registration(name, "is registered twice; every codec file registers one name of its own");
  }
  auto specs = specs_by_variant(name, factory);
  size_t num_specs = specs.size();
  for (const auto& [other, entry] : all.entries) num_specs += entry.specs.size();
  if (num_specs > kMaxNumber) {
    reject_registration(name, "makes the options of all codecs " + std::to_string(num_specs) + ", more than the " +
                                  std::to_string(kMaxNumber) + " that a number of a byte tells apart; widen " +
                                  "Operation::codec");
  }
  all.entries.emplace(std::string(name), Entry{std::move(factory), std::move(specs)});
  return true;
}

const Codec& get_codec(std::string_view spec) {
  const std::vector<std::string> names = registered_codecs();
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto made = all.instances.find(spec);
  if (made != all.instances.end()) return *made->second;
  CodecOptions options(spec);
  const auto found = all.entries.find(options.name());
  if (found == all.entries.end()) {
    throw Error(ErrorKind::kInvalidArgument,
                "unknown codec \"" + options.name() + "\"; the registered codecs are: " + joined(names));
  }
  auto codec = found->second.factory(options);
  options.check_all_known();
  return *all.instances.emplace(std::string(spec), std::move(codec)).first->second;
}

std::vector<std::string> registered_codecs() {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::vector<std::string> names;
  for (const auto& [name, entry] : all.entries) names.push_back(name);
  return names;
}

uint8_t codec_number(const Codec& codec) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const int variant = codec.variant();
  size_t number = 1;
  for (const auto& [name, entry] : all.entries) {
    if (name == codec.name() && variant >= 0 && variant < static_cast<int>(entry.specs.size())) {
      return static_cast<uint8_t>(number + static_cast<size_t>(variant));  // at most kMaxNumber
    }
    number += entry.specs.size();
  }
  reject_registration(codec.name(), "of variant " + std::to_string(variant) + " is not registered");
}

std::string codec_spec(uint8_t number) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (number == 0) return "";
  size_t variant = number - size_t{1};
  for (const auto& [name, entry] : all.entries) {
    if (variant < entry.specs.size()) return entry.specs[variant];
    variant -= entry.specs.size();
  }
  return "";
}

CodecOptions::CodecOptions(std::string_view spec) : name_(spec.substr(0, spec.find(':'))) {
  // One character past each option: ':' in front of the first, ',' in front of the others.
  for (size_t end = name_.size(); end < spec.size();) {
    const size_t begin = end + 1;
    end = std::min(spec.find(',', begin), spec.size());
    const std::string one(spec.substr(begin, end - begin));
    const size_t equals = one.find('=');
    if (equals == std::string::npos) {
      throw Error(ErrorKind::kInvalidArgument, "codec \"" + name_ + "\" has the option \"" + one +
                                                   "\"; options are given as name:option=value,option=value");
    }
    const std::string option = one.substr(0, equals);
    if (!values_.try_emplace(option, one.substr(equals + 1)).second) {
      throw Error(ErrorKind::kInvalidArgument,
                  "codec \"" + name_ + "\" has the option \"" + option + "\" twice; give it once");
    }
  }
}

int CodecOptions::one_of(std::string_view option, std::initializer_list<int> allowed) {
  std::vector<std::string> texts;
  for (const int value : allowed) texts.push_back(std::to_string(value));
  known_.push_back({std::string(option), texts});
  const auto given = values_.find(option);
  if (given == values_.end()) return *allowed.begin();
  const auto found = std::find(texts.begin(), texts.end(), given->second);
  if (found != texts.end()) return allowed.begin()[found - texts.begin()];
  throw Error(ErrorKind::kInvalidArgument, "codec \"" + name_ + "\": " + std::string(option) + " is " + given->second +
                                               ", expected one of " + joined(texts));
}

void CodecOptions::check_all_known() const {
  std::vector<std::string> names;
  for (const Option& option : known_) names.push_back(option.name);
  for (const auto& [option, value] : values_) {
    if (std::find(names.begin(), names.end(), option) != names.end()) continue;
    throw Error(ErrorKind::kInvalidArgument,
                "codec \"" + name_ + "\" has no option \"" + option + "\"" +
                    (names.empty() ? "; it has none" : "; its options are: " + joined(names)));
  }
}

std::vector<std::string> CodecOptions::all_specs() const {
  std::vector<std::string> specs = {name_};
  for (const Option& option : known_) {
    const size_t num_shorter = specs.size();
    for (size_t v = 1; v < option.allowed.size(); ++v) {  // 0 is the default
      for (size_t i = 0; i < num_shorter; ++i) {
        const std::string& shorter = specs[i];
        specs.push_back(shorter + (shorter == name_ ? ":" : ",") + option.name + "=" + option.allowed[v]);
      }
    }
  }
  return specs;
}

}  // namespace bagua
