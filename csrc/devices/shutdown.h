// Process exit: work in threads that are not Python's must finish before the state that it uses is torn down.
#pragma once

namespace backplane {

// Returns when PyTorch's autograd threads of bp devices have released everything they were given. Such a thread can
// hold its last backward pass, with Python objects, for a moment after backward() has returned. If it releases them
// while Python is being finalized, the process ends with an error. The caller must not hold the GIL. Does nothing if no
// device has been used.
void finish_autograd_threads();

// Registers an exit handler that waits for running host functions and lets no further one start. Call it late, since
// exit handlers and static destructors run in reverse order of registration.
void finish_host_calls_at_exit();

// Exists while a stream runs a host function.
class HostCall {
 public:
  HostCall() noexcept;
  ~HostCall();
  HostCall(const HostCall&) = delete;
  HostCall& operator=(const HostCall&) = delete;

  // False if the process is exiting: the function must not be called then.
  bool may_run() const noexcept {
    return may_run_;
  }

 private:
  bool may_run_;
};

} // namespace backplane
