// The table of codecs: filled by the static initialisers of the codec files while the module loads, read
// by every rank's threads afterwards. Number 1 + 8 i + v stands for variant v of name i of the sorted names.
#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <utility>

#include "csrc/codecs/codec.h"
#include "csrc/common/error.h"

namespace bagua {
namespace {

constexpr size_t kMaxCodecs = 255 / kNumCodecVariants;  // whose numbers fit in a byte

struct Entry {
  CodecFactory factory;
  std::array<std::string, kNumCodecVariants> specs;  // by variant; empty where there is none
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

// Makes the codec once with every combination of its options.
std::array<std::string, kNumCodecVariants> specs_by_variant(std::string_view name, const CodecFactory& factory) {
  std::array<std::string, kNumCodecVariants> specs;
  CodecOptions defaults(name);
  factory(defaults);
  for (const std::string& spec : defaults.all_specs()) {
    CodecOptions options(spec);
    const int variant = factory(options)->variant();
    if (variant < 0 || variant >= kNumCodecVariants) {
      reject_registration(name, "has variant " + std::to_string(variant) + " as " + spec + ", expected 0 to " +
                                    std::to_string(kNumCodecVariants - 1));
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
  if (all.entries.size() == kMaxCodecs) {
    reject_registration(name, "is one more than the " + std::to_string(kMaxCodecs) + " that a number of a byte tells " +
                                  "apart; widen Operation::codec");
  }
  auto specs = specs_by_variant(name, factory);
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
  const auto found = all.entries.find(codec.name());
  const int variant = codec.variant();
  if (found == all.entries.end() || variant < 0 || variant >= kNumCodecVariants) {
    reject_registration(codec.name(), "of variant " + std::to_string(variant) + " is not registered");
  }
  const auto index = static_cast<int>(std::distance(all.entries.begin(), found));
  return static_cast<uint8_t>(1 + kNumCodecVariants * index + variant);  // at most 248, by kMaxCodecs
}

std::string codec_spec(uint8_t number) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const size_t offset = number - size_t{1}, index = offset / kNumCodecVariants;  // of 0: past the end
  if (index >= all.entries.size()) return "";
  return std::next(all.entries.begin(), static_cast<std::ptrdiff_t>(index))->second.specs[offset % kNumCodecVariants];
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
