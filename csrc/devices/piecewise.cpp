#include "devices/piecewise.h"

#include <algorithm>
#include <iterator>
#include <map>

#include "devices/openmp.h"

namespace backplane {
namespace {

// Elements of a piece. Five of float32, as an optimizer's step has, are two thirds of a processor's second cache.
constexpr int64_t kElements = 1 << 15;

std::vector<Piecewise::Piece> pieces_of(c10::ArrayRef<int64_t> elements) {
  std::vector<Piecewise::Piece> pieces;
  size_t first = 0; // of small ones that come to a piece
  int64_t held = 0;
  const auto close = [&](size_t end) {
    if (first < end) {
      pieces.push_back({first, end, 0, kElements});
    }
    held = 0;
  };
  for (size_t i = 0; i < elements.size(); ++i) {
    if (held + elements[i] > kElements) {
      close(i);
      first = i;
    }
    held += elements[i];
    if (elements[i] > kElements) {
      for (int64_t from = 0; from < elements[i]; from += kElements) {
        pieces.push_back({i, i + 1, from, std::min(from + kElements, elements[i])});
      }
      first = i + 1;
      held = 0;
    }
  }
  close(elements.size());
  return pieces;
}

// Where tensors are.
class Inhabitants {
 public:
  // False where one of the call's overlaps another that is not alike.
  bool add(const PiecewiseCall& call) {
    const auto elements = call.work->elements();
    for (size_t i = 0; i < call.memory.size(); ++i) {
      const size_t place = i % elements.size();
      const size_t bytes = static_cast<size_t>(elements[place]) * call.work->element_bytes();
      if (bytes > 0 && !add(call.memory[i], bytes, place)) {
        return false;
      }
    }
    return true;
  }

 private:
  struct Inhabitant {
    const char* end;
    size_t place; // in its list
  };

  bool add(const char* start, size_t bytes, size_t place) {
    const auto [found, is_new] = all_.try_emplace(start, Inhabitant{start + bytes, place});
    if (!is_new) {
      return found->second.end == start + bytes && found->second.place == place;
    }
    const auto next = std::next(found);
    return (next == all_.end() || next->first >= start + bytes) &&
        (found == all_.begin() || std::prev(found)->second.end <= start);
  }

  std::map<const char*, Inhabitant> all_; // by where they begin
};

} // namespace

size_t count_together(c10::ArrayRef<PiecewiseCall> calls) {
  if (calls.size() < 2) {
    return calls.size();
  }
  Inhabitants inhabitants;
  size_t count = 0;
  while (count < calls.size() && calls[count].work->elements() == calls[0].work->elements() &&
         calls[count].work->element_bytes() == calls[0].work->element_bytes() && inhabitants.add(calls[count])) {
    ++count;
  }
  return std::max<size_t>(count, 1); // one alone overlaps as its operator allows
}

void run_piece_by_piece(c10::ArrayRef<PiecewiseCall> calls) {
  const auto pieces = pieces_of(calls[0].work->elements());
  run_side_by_side(static_cast<int64_t>(pieces.size()), [&](int64_t i) {
    for (const PiecewiseCall& call : calls) {
      call.work->run(call.memory.data(), pieces[i]);
    }
  });
}

} // namespace backplane
