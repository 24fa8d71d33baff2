// Counts memory accesses of launches: an observer of the interpreter (interpreter/interpreter.h).

#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "interpreter.h"

namespace observer {
namespace {

// --- interface to Python: driver.py declares the same structures -----------------------------------------------------

constexpr int kMaxOperands = 64;

struct Settings {
  uint64_t subgroup;       // work items of a warp
  uint64_t sector;         // bytes of a sector, the unit in which memory is moved
  uint64_t cache_sectors;  // sectors in the cache of a group
  uint64_t banks;          // of local memory, 4 bytes wide
  uint64_t samples;        // number of sampled groups of a launch
  uint64_t max_records;   // maximum number of accesses recorded per sampled group
  uint64_t counts;         // whether anything is counted; if not, launches only compute
  uint64_t computes;       // groups that run: all (0), sampled ones (1), none (2)
};

struct Operand {
  double sectors;  // moved by all groups together
  double written;  // those of them that are moved to it
  uint64_t first;  // address of the first byte that was accessed
  uint64_t last;   // address behind the last byte that was accessed
  uint64_t samples;  // sampled groups that accessed it
};

struct Summary {
  uint64_t kernel;  // its number; 0: a copy or a fill of `bytes`
  uint64_t bytes;
  uint64_t group;  // work items of a group
  uint64_t groups;
  uint64_t sampled;
  uint64_t chain;         // accesses of one item one after another, including those of items that it waits for
  uint64_t chain_global;  // accesses of the chain to device memory
  uint64_t barriers;      // maximum of all groups
  uint64_t divergent;     // groups with a barrier that some items do not reach
  double accesses;        // of items to device memory; the sums from here on are for all groups
  double local_accesses;
  double requests;       // accesses of warps to device memory
  double sectors;        // accessed by these requests
  double min_sectors;  // minimum for the same bytes
  double local_turns;    // cycles of local memory for the accesses of warps
  double min_local_turns;  // minimum without bank conflicts
  uint64_t operands;
  Operand operand[kMaxOperands];
};

// --- state: one launch at a time -----------------------------------------------------------------------------------

struct Record {
  uint64_t address;
  uint64_t time;  // phase (upper 32 bits), and number of the item's access since its last barrier or shuffle
  uint32_t item;
  uint32_t instruction;
  uint32_t repetition;  // how often the item executed the instruction before
  uint8_t size;
  bool local;
  bool written;
};

Settings settings{32, 32, 512, 32, 16, 1 << 18, 0, 0};
std::vector<Summary> summaries;
std::vector<Record> records;

Summary summary;  // of the launch
uint64_t item_global = 0, item_local = 0;  // accesses of the item since it last started or resumed
uint64_t phase = 0;                        // of the group: number of barriers that it passed
bool recording = false;
uint64_t group_accesses = 0, group_local = 0;  // all accesses of a sampled group, recorded or not
Operand operands[kMaxOperands];               // of the launch
uint64_t touched = 0;                          // bit mask of the operands that the group accessed
std::vector<uint64_t> phase_accesses[2];       // all accesses by phase: to device memory, to local memory
uint64_t max_global = 0, max_local = 0;      // maximum numbers of accesses recorded per item in a phase
uint64_t recorded[2] = {0, 0};                 // accesses recorded in the group: to device memory, to local memory
bool diverged = false;

struct Longest {
  uint64_t total = 0, global = 0;
};
Longest chain, of_phase;  // of the group, and of an item since the last barrier or shuffle

// (begin, number) of each operand, sorted. An address belongs to the last operand that begins at or before it.
using Operands = std::vector<std::pair<uint64_t, int>>;
Operands operands_by_address;

int operand_of(uint64_t address) {
  int found = 0;
  for (const auto& [begin, number] : operands_by_address) {
    if (begin > address) {
      break;
    }
    found = number;
  }
  return found;
}

// Cache by instruction: the operand that it last accessed, and will probably access again.
uint8_t recent[256];

inline void note_operand(uint64_t address, uint64_t size, uint64_t instruction) {
  uint8_t& known = recent[(instruction >> 2) % 256];
  if ((touched >> known & 1) != 0 && address >= operands[known].first && address + size <= operands[known].last) {
    return;
  }
  known = static_cast<uint8_t>(operand_of(address));
  operands[known].first = std::min(operands[known].first, address);
  operands[known].last = std::max(operands[known].last, address + size);
  touched |= uint64_t{1} << known;
}

constexpr uint64_t kMaxBytes = 16;  // moved by one instruction

template <Access access>
inline void touch(uint64_t address, uint64_t size, uint64_t instruction) {
  for (; size > kMaxBytes; address += kMaxBytes, size -= kMaxBytes) {
    touch<access>(address, kMaxBytes, instruction);
  }
  const bool local = address - launch.kernel->local_begin < launch.kernel->local_end - launch.kernel->local_begin;
  if (!local && !in_arena(address)) {
    return;  // the item's stack, or a constant of the kernel
  }
  if (local) {
    ++item_local;
  } else {
    ++item_global;
  }
  if (__builtin_expect(recording, 0)) {
    ++(local ? group_local : group_accesses);
    if (!local) {
      note_operand(address, size, instruction);
    }
    // Records the same number of accesses for each item in a phase, so that the accesses of a warp are complete.
    if ((local ? item_local <= max_local : item_global <= max_global) && records.size() < 4 * settings.max_records) {
      ++recorded[local];
      records.push_back({address, phase << 32 | (item_global + item_local), item, static_cast<uint32_t>(instruction), 0,
                         static_cast<uint8_t>(size), local, access != kRead});
    }
  }
}

// --- groups and items ------------------------------------------------------------------------------------------------

// Each phase gets a quarter of the remaining budget of records, since the number of phases is unknown.
void phase_begins() {
  const uint64_t budget[2] = {settings.max_records * 3 / 4, settings.max_records / 4};
  max_global = std::max<uint64_t>(16, (budget[0] - std::min(budget[0], recorded[0])) / 4 / launch.group_items);
  max_local = (budget[1] - std::min(budget[1], recorded[1])) / 4 / launch.group_items;
  of_phase = {};
}

void group_begins() {
  phase = 0;
  chain = {};
  diverged = false;
  phase_begins();
}

void item_begins() {
  item_global = item_local = 0;
}

void item_stops() {
  if (recording) {
    for (std::vector<uint64_t>& one : phase_accesses) {
      one.resize(std::max<uint64_t>(one.size(), phase + 1));
    }
    phase_accesses[0][phase] += item_global;
    phase_accesses[1][phase] += item_local;
  }
  if (item_global + item_local > of_phase.total) {
    of_phase = {item_global + item_local, item_global};
  }
}

void subgroup_meets(uint32_t) {}

void exchange_ends() {
  chain.total += of_phase.total;
  chain.global += of_phase.global;
  of_phase = {};
}

void phase_ends(bool diverges, uint32_t) {
  diverged = diverged || diverges;
  exchange_ends();
  ++phase;
  phase_begins();
}

void compute(uint64_t number) {
  run_group(number);
  summary.barriers = std::max(summary.barriers, phase - 1);
  summary.divergent += diverged ? 1 : 0;
  if (chain.total > summary.chain) {
    summary.chain = chain.total;
    summary.chain_global = chain.global;
  }
}

// --- evaluation of a sampled group -----------------------------------------------------------------------------------

struct Event {
  uint64_t time;
  uint64_t sector;
  double weight;
  bool written;
};

void count_repetitions() {
  std::stable_sort(records.begin(), records.end(), [](const Record& a, const Record& b) { return a.item < b.item; });
  std::unordered_map<uint32_t, uint32_t> times;
  uint32_t item = ~0u;
  for (Record& one : records) {
    if (one.item != item) {
      times.clear();
      item = one.item;
    }
    one.repetition = times[one.instruction]++;
  }
}

double turns_of_banks(const std::vector<std::pair<uint64_t, uint32_t>>& wanted, double* least) {
  std::vector<uint64_t> words;
  for (const auto& [address, size] : wanted) {
    for (uint64_t word = address / 4; word <= (address + size - 1) / 4; ++word) {
      words.push_back(word);
    }
  }
  std::sort(words.begin(), words.end());
  words.erase(std::unique(words.begin(), words.end()), words.end());
  std::vector<uint32_t> of_bank(settings.banks);
  for (const uint64_t word : words) {
    ++of_bank[word % settings.banks];
  }
  *least += static_cast<double>((words.size() + settings.banks - 1) / settings.banks);
  return *std::max_element(of_bank.begin(), of_bank.end());
}

void look_at_records(double weight) {
  summary.accesses += weight * static_cast<double>(group_accesses);
  summary.local_accesses += weight * static_cast<double>(group_local);
  if (records.empty()) {
    return;
  }
  // Recorded accesses are extrapolated to their phase, and recorded phases to all phases.
  std::vector<uint64_t> of_phase[2];
  double group_weight[2];
  for (const bool local : {false, true}) {
    of_phase[local].resize(phase_accesses[local].size());
    for (const Record& one : records) {
      of_phase[local][one.time >> 32] += one.local == local ? 1 : 0;
    }
    uint64_t known = 0;
    for (size_t i = 0; i < of_phase[local].size(); ++i) {
      known += of_phase[local][i] != 0 ? phase_accesses[local][i] : 0;
    }
    const uint64_t all = local ? group_local : group_accesses;
    group_weight[local] = weight * static_cast<double>(all) / static_cast<double>(std::max<uint64_t>(1, known));
  }
  count_repetitions();
  const auto key = [](const Record& one) {
    return std::make_tuple(one.local, one.instruction, one.repetition, one.item / settings.subgroup);
  };
  std::sort(records.begin(), records.end(), [&](const Record& a, const Record& b) { return key(a) < key(b); });
  std::vector<Event> events;
  std::vector<std::pair<uint64_t, uint32_t>> wanted;
  std::vector<uint64_t> sectors;
  for (size_t begin = 0, end = 0; begin < records.size(); begin = end) {
    uint64_t time = ~uint64_t{0};
    wanted.clear();
    for (end = begin; end < records.size() && key(records[end]) == key(records[begin]); ++end) {
      wanted.emplace_back(records[end].address, records[end].size);
      time = std::min(time, records[end].time);
    }
    const uint64_t in = time >> 32;
    const bool local = records[begin].local, written = records[begin].written;
    const auto share = static_cast<double>(phase_accesses[local][in]) / static_cast<double>(of_phase[local][in]);
    weight = group_weight[local] * share;
    std::sort(wanted.begin(), wanted.end());
    wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
    if (records[begin].local) {
      double least = 0;
      summary.local_turns += weight * turns_of_banks(wanted, &least);
      summary.min_local_turns += weight * least;
      continue;
    }
    sectors.clear();
    uint64_t bytes = 0, beyond = 0;
    for (const auto& [address, size] : wanted) {
      for (uint64_t one = address / settings.sector; one <= (address + size - 1) / settings.sector; ++one) {
        sectors.push_back(one);
      }
      const uint64_t from = std::max(address, beyond);
      bytes += address + size > from ? address + size - from : 0;
      beyond = std::max(beyond, address + size);
    }
    std::sort(sectors.begin(), sectors.end());
    sectors.erase(std::unique(sectors.begin(), sectors.end()), sectors.end());
    summary.requests += weight;
    summary.sectors += weight * static_cast<double>(sectors.size());
    summary.min_sectors += weight * static_cast<double>((bytes + settings.sector - 1) / settings.sector);
    for (const uint64_t one : sectors) {
      events.push_back({time, one, weight, written});
    }
  }
  // Items run in lockstep, so accesses are sorted by time. A sector hits the cache if at most cache_sectors accesses came
  // since its last one. One that is read and then written moves twice: into the cache and back.
  std::stable_sort(events.begin(), events.end(), [](const Event& a, const Event& b) { return a.time < b.time; });
  struct Seen {
    uint64_t number;
    bool written;
  };
  std::unordered_map<uint64_t, Seen> seen;
  for (uint64_t number = 0; number < events.size(); ++number) {
    const auto& [when, sector, times, written] = events[number];
    const auto found = seen.find(sector);
    const bool hit = found != seen.end() && number - found->second.number <= settings.cache_sectors;
    const bool was_written = hit && found->second.written;
    if (!hit || (written && !was_written)) {
      Operand& moved = operands[operand_of((sector + 1) * settings.sector - 1)];
      moved.sectors += times;
      moved.written += written ? times : 0;
    }
    seen[sector] = {number, written || was_written};
  }
}

uint64_t mixed(uint64_t x) {  // the final steps of splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

constexpr size_t kMany = 1 << 15;  // if the first group has more recorded accesses than this,
constexpr uint64_t kFew = 6;       // only this many groups are sampled

// Returns the first group, the last, and one pseudorandom group from each of `wanted` - 2 ranges between them.
std::vector<uint64_t> choose_samples(uint64_t groups, uint64_t wanted) {
  std::vector<uint64_t> chosen;
  if (groups <= wanted) {
    for (uint64_t i = 0; i < groups; ++i) {
      chosen.push_back(i);
    }
    return chosen;
  }
  const uint64_t between = wanted - 2;
  chosen.push_back(0);
  for (uint64_t part = 0; part < between; ++part) {
    const uint64_t begin = 1 + part * (groups - 2) / between, end = 1 + (part + 1) * (groups - 2) / between;
    chosen.push_back(begin + mixed(part + groups) % (end - begin));
  }
  chosen.push_back(groups - 1);
  return chosen;
}

// --- launches --------------------------------------------------------------------------------------------------------

void look_at(uint64_t number, double weight) {
  records.clear();
  phase_accesses[0].clear();
  phase_accesses[1].clear();
  group_accesses = group_local = recorded[0] = recorded[1] = 0;
  touched = 0;
  recording = true;
  compute(number);
  recording = false;
  for (int i = 0; i < kMaxOperands; ++i) {
    operands[i].samples += touched >> i & 1;
  }
  look_at_records(weight);
}

Operands operands_of(const Argument* given, uint64_t count) {
  Operands found;
  for (uint64_t i = 0; i < count; ++i) {
    if (given[i].bytes == 0 && found.size() < kMaxOperands) {
      const uint64_t memory = reinterpret_cast<uint64_t>(given[i].memory);
      found.emplace_back(memory != 0 ? memory + given[i].offset : 0, static_cast<int>(found.size()));
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

int run(Operands&& given) {
  operands_by_address = std::move(given);
  summary = {};
  summary.operands = operands_by_address.size();
  summary.kernel = launch.kernel->number;
  summary.group = launch.group_items;
  summary.groups = launch.group_count;
  std::fill(std::begin(operands), std::end(operands), Operand{0, 0, ~uint64_t{0}, 0, 0});
  const bool counts = settings.counts != 0, all_compute = settings.computes == 0;
  if (settings.computes < 2) {
    counts ? look_at(0, 1) : compute(0);
    const std::vector<uint64_t> samples = choose_samples(summary.groups, records.size() > kMany ? kFew : settings.samples);
    summary.sampled = counts ? samples.size() : 0;
    const bool all = samples.size() == summary.groups;
    const double between = static_cast<double>(summary.groups - 2) / static_cast<double>(samples.size() - 2);
    uint64_t done = 1;
    for (auto next = samples.begin() + 1; next != samples.end(); ++next) {
      for (; all_compute && done < *next; ++done) {
        compute(done);
      }
      done = *next + 1;
      counts ? look_at(*next, all || done == summary.groups ? 1 : between) : compute(*next);
    }
  }
  if (counts) {
    std::copy(std::begin(operands), std::end(operands), summary.operand);
    summaries.push_back(summary);
  }
  return 0;
}

void transferred(uint64_t bytes) {
  if (settings.counts != 0) {
    summaries.emplace_back();
    summaries.back().bytes = bytes;
  }
}

bool allocated(uint64_t, uint64_t) {
  return true;
}
void freed(uint64_t, uint64_t) {}

}  // namespace
}  // namespace observer

extern "C" {

void audit_set(const observer::Settings* wanted) {
  std::lock_guard lock(launching);
  observer::settings = *wanted;
  observer::summaries.clear();
}

uint64_t audit_count() {
  return observer::summaries.size();
}

const observer::Summary* audit_get(uint64_t number) {
  return &observer::summaries[number];
}

uint64_t audit_sizes(uint64_t which) {
  return which == 0 ? sizeof(observer::Settings) : sizeof(observer::Summary);
}
}
