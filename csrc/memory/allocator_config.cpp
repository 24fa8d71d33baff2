#include "memory/allocator_config.h"

#include "compat.h"

#include <c10/core/AllocatorConfig.h>
#include <c10/util/Exception.h>
#include <c10/util/env.h>

#include <atomic>
#include <charconv>
#include <cmath>
#include <functional>
#include <locale>
#include <mutex>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace backplane {

namespace {

using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;

enum class Kind { Count, Fraction, Switch, Divisions, Backend, Anything };

// ours: handled by torch.cuda's parser, not by PyTorch's shared parser. effective: accepted without a warning.
struct Option {
  std::string_view name;
  Kind kind;
  bool ours;
  bool effective;
};

constexpr Option kOptions[] = {
    {"max_split_size_mb", Kind::Count, false, true},
    {"max_non_split_rounding_mb", Kind::Count, false, true},
    {"large_segment_size_mb", Kind::Count, false, true},
    {"garbage_collection_threshold", Kind::Fraction, false, true},
    {"roundup_power2_divisions", Kind::Divisions, false, true},
    {"expandable_segments", Kind::Switch, false, true},
    {"pinned_use_background_threads", Kind::Switch, false, true},
    {"pinned_max_round_threshold_mb", Kind::Count, false, true},
    {"pinned_max_cached_size_mb", Kind::Count, false, true},
    {"per_process_memory_fraction", Kind::Fraction, true, true},
    {"backend", Kind::Backend, true, true},
    // Always the case: the lock is never held while a device allocates.
    {"release_lock_on_cudamalloc", Kind::Switch, true, true},
    {"release_lock_on_hipmalloc", Kind::Switch, true, true},
    // Not needed: a device stays usable after an out-of-memory error.
    {"throw_on_cudamalloc_oom", Kind::Switch, true, true},
    {"graph_capture_record_stream_reuse", Kind::Switch, true, false},
    {"pinned_use_cuda_host_register", Kind::Switch, true, false},
    {"pinned_use_hip_host_register", Kind::Switch, true, false},
    {"pinned_num_register_threads", Kind::Count, true, false},
    {"pinned_reserve_segment_size_mb", Kind::Count, true, false},
    {"pinned_free_catch_all", Kind::Switch, true, false},
    {"expandable_segments_reserve", Kind::Anything, true, false},
    {"expandable_segments_reserve_by_class", Kind::Anything, true, false},
};

const Option* find_option(std::string_view name) {
  for (const Option& option : kOptions) {
    if (option.name == name) {
      return &option;
    }
  }
  return nullptr;
}

bool is_count(std::string_view text) {
  size_t value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

bool is_fraction(std::string_view text) {
  double value = 0;
  std::istringstream stream{std::string(text)}; // macOS before 26 has no std::from_chars for double
  stream.imbue(std::locale::classic());
  return stream >> std::noskipws >> value && stream.peek() == std::istringstream::traits_type::eof() && value >= 0 &&
      value <= 1;
}

// One `key:value` pair of the string. The value of a list is the text between the brackets.
struct Setting {
  std::string key;
  std::string value;
  bool is_list = false;
};

std::vector<Setting> split_settings(const std::string& text) {
  std::string rest;
  for (char c : text) {
    if (!std::isspace(static_cast<unsigned char>(c))) {
      rest += c;
    }
  }
  std::vector<Setting> settings;
  size_t at = 0;
  while (at < rest.size()) {
    Setting setting;
    size_t colon = rest.find_first_of(":,[]", at);
    TORCH_CHECK_VALUE(
        colon != std::string::npos && rest[colon] == ':' && colon > at, "PYTORCH_ALLOC_CONF='", text,
        "': expected key:value pairs with commas between them, found '", rest.substr(at), "'");
    setting.key = rest.substr(at, colon - at);
    at = colon + 1;
    setting.is_list = at < rest.size() && rest[at] == '[';
    size_t end = setting.is_list ? rest.find(']', at) : rest.find_first_of(":,[]", at);
    TORCH_CHECK_VALUE(
        !setting.is_list || end != std::string::npos, "PYTORCH_ALLOC_CONF='", text, "': the list of '", setting.key,
        "' has no closing ']'");
    end = std::min(end, rest.size());
    setting.value = rest.substr(at + setting.is_list, end - at - setting.is_list);
    at = end + setting.is_list;
    TORCH_CHECK_VALUE(
        at == rest.size() || rest[at] == ',', "PYTORCH_ALLOC_CONF='", text, "': expected a comma after the value of '",
        setting.key, "', found '", rest.substr(at), "'");
    ++at;
    settings.push_back(std::move(setting));
  }
  return settings;
}

bool is_divisions(const Setting& setting) {
  if (!setting.is_list) {
    return is_count(setting.value);
  }
  std::string_view rest = setting.value;
  do {
    std::string_view pair = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(pair.size() + 1, rest.size()));
    size_t colon = pair.find(':');
    if (colon == std::string_view::npos || !is_count(pair.substr(colon + 1)) ||
        !(pair.substr(0, colon) == ">" || is_count(pair.substr(0, colon)))) {
      return false;
    }
  } while (!rest.empty());
  return true;
}

void check_setting(const Setting& setting, Kind kind) {
  auto require = [&](bool good, const char* accepted) {
    TORCH_CHECK_VALUE(
        good, "PYTORCH_ALLOC_CONF: '", setting.key, "' must be ", accepted, ", not '",
        setting.is_list ? "[" + setting.value + "]" : setting.value, "'");
  };
  switch (kind) {
    case Kind::Count:
      return require(!setting.is_list && is_count(setting.value), "a whole number");
    case Kind::Fraction:
      return require(!setting.is_list && is_fraction(setting.value), "a number from 0 to 1");
    case Kind::Switch:
      return require(setting.value == "True" || setting.value == "False", "True or False");
    case Kind::Divisions:
      return require(
          is_divisions(setting), "a power of two, or a list of size_in_MiB:power_of_two pairs like [256:1,512:2,>:4]");
    case Kind::Backend:
      return require(setting.value == "native", "native, the only allocator backend of bp devices");
    case Kind::Anything:
      return;
  }
}

void check_settings(const std::string& text) {
  for (const Setting& setting : split_settings(text)) {
    if (const Option* option = find_option(setting.key)) {
      check_setting(setting, option->kind);
      continue;
    }
    if (Config::getKeys().count(setting.key) == 0) {
      std::string known;
      for (const Option& other : kOptions) {
        known += (known.empty() ? "" : ", ") + std::string(other.name);
      }
      TORCH_CHECK_VALUE(false, "PYTORCH_ALLOC_CONF: unknown option '", setting.key, "'; known options are ", known);
    }
  }
}

AllocatorSettings current;
std::mutex text_mutex;
std::string current_text;

void refresh() {
  current.large_segment_size = compat::large_segment_size<Config>();
  current.max_split_size = Config::max_split_size();
  current.max_non_split_rounding_size = Config::max_non_split_rounding_size();
  current.garbage_collection_threshold = Config::garbage_collection_threshold();
  current.expandable_segments = Config::use_expandable_segments();
  const std::vector<size_t>& divisions = Config::roundup_power2_divisions();
  for (size_t i = 0; i < current.roundup_power2_divisions.size(); ++i) {
    current.roundup_power2_divisions[i] = i < divisions.size() ? divisions[i] : 0;
  }
}

// Applies the options that PyTorch's shared parser does not handle. Returns the options without effect.
std::vector<std::string> parse_our_options(const std::string& text) {
  std::vector<std::string> without_effect;
  check_settings(text);
  for (const Setting& setting : split_settings(text)) {
    const Option* option = find_option(setting.key);
    if (setting.key == "per_process_memory_fraction") {
      current.per_process_memory_fraction = std::stod(setting.value);
    }
    if (option != nullptr && !option->effective) {
      without_effect.push_back(setting.key);
    }
  }
  refresh();
  std::lock_guard<std::mutex> guard(text_mutex);
  current_text = text;
  return without_effect;
}

void warn_of(const std::vector<std::string>& without_effect) {
  for (const std::string& name : without_effect) {
    TORCH_WARN("PYTORCH_ALLOC_CONF: '", name, "' has no effect on bp devices");
  }
}

} // namespace

const AllocatorSettings& allocator_settings() {
  return current;
}

std::string allocator_settings_text() {
  std::lock_guard<std::mutex> guard(text_mutex);
  return current_text;
}

void load_allocator_settings() {
  // Not std::call_once: under ThreadSanitizer it hangs after an exception.
  static std::atomic<bool> loaded{false};
  static std::mutex loading;
  std::vector<std::string> without_effect;
  if (loaded.load(std::memory_order_acquire)) {
    return;
  }
  {
    const std::lock_guard<std::mutex> guard(loading);
    if (loaded.load(std::memory_order_relaxed)) {
      return;
    }
    auto text = c10::utils::get_env("PYTORCH_ALLOC_CONF");
    if (!text.has_value()) {
      text = c10::utils::get_env("PYTORCH_CUDA_ALLOC_CONF");
    }
    if (text.has_value()) {
      check_settings(*text);
      Config::instance(); // parses the environment
      without_effect = parse_our_options(*text);
    }
    refresh();
    loaded.store(true, std::memory_order_release);
  }
  warn_of(without_effect); // without the lock: a warning needs the GIL, whose holder can be waiting for the lock
}

void set_allocator_settings(const std::string& settings) {
  load_allocator_settings();
  check_settings(settings);
  c10::CachingAllocator::setAllocatorSettings(settings);
}

void register_allocator_options() {
  current.per_process_memory_fraction = 1.0;
  // torch.cuda may have registered its parser for the same names already: keep it, and run after it.
  auto& hook = Config::getConfigParserHook();
  hook = [earlier = hook](const std::string& text) {
    if (earlier) {
      earlier(text);
    }
    warn_of(parse_our_options(text));
  };
  for (const Option& option : kOptions) {
    if (option.ours) {
      Config::getMutableKeys().insert(std::string(option.name));
    }
  }
}

} // namespace backplane
