// Tells whether this thread is inside a call of a Python driver.
//
// Python can collect garbage there, including tensors. Freeing them must not call the driver again: it can hold a lock
// that is not reentrant, or be in the middle of a change. The caching allocator and the allocator of pinned memory
// check this and defer their calls of the driver.
#pragma once

namespace backplane {

bool inside_driver_call() noexcept;

// This thread is inside a driver call during its lifetime.
class InsideDriverCall {
 public:
  InsideDriverCall() noexcept;
  ~InsideDriverCall();
  InsideDriverCall(const InsideDriverCall&) = delete;
  InsideDriverCall& operator=(const InsideDriverCall&) = delete;
};

} // namespace backplane
