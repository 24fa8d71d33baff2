// Whether this thread is inside a call of a driver that is written in Python.
//
// Python may collect garbage there, and what it collects may be tensors. Freeing them must not call the driver again: it
// may hold a lock of its own that is not its thread's to take twice, and it may be in the middle of a change. So the
// caching allocator and the allocator of pinned memory ask here, and put off what they would have asked of a driver.
#pragma once

namespace backplane {

bool inside_driver_call() noexcept;

// This thread calls a driver while it lives.
class InsideDriverCall {
 public:
  InsideDriverCall() noexcept;
  ~InsideDriverCall();
  InsideDriverCall(const InsideDriverCall&) = delete;
  InsideDriverCall& operator=(const InsideDriverCall&) = delete;
};

} // namespace backplane
