// Work on lists of tensors whose elements are computed each by itself: an optimizer's steps, say. Several such works after one
// another go over the same megabytes. Done piece by piece, each piece by all of them, they find theirs in the processor's cache.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace backplane {

class Piecewise {
 public:
  virtual ~Piecewise() = default;

  // How many elements the tensors of each list have; all lists have as many tensors, and all are contiguous.
  virtual c10::ArrayRef<int64_t> elements() const = 0;
  virtual size_t element_bytes() const = 0;

  // Some of the tensors, of which it has elements from `from` on, up to `to` or their ends.
  struct Piece {
    size_t first, end;
    int64_t from, to;
  };
  // What it does to one; it throws nothing. `memory`: where tensors begin, list by list.
  virtual void run(char* const* memory, const Piece& piece) const = 0;
};

struct PiecewiseCall {
  const Piecewise* work;
  c10::ArrayRef<char*> memory;
};

// How many of the calls, from the first on, come to the same when they are done piece by piece: their tensors are as large, and
// none has memory in common with another tensor, unless that has the same place in its list.
size_t count_together(c10::ArrayRef<PiecewiseCall> calls);

// Does calls that can be done together, by the threads of the calling one.
void run_piece_by_piece(c10::ArrayRef<PiecewiseCall> calls);

} // namespace backplane
