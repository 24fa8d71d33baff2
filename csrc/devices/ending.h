// The end of the process: what runs in threads that are not Python's has to be over before what it uses is torn down.
#pragma once

namespace backplane {

// Returns when the threads in which PyTorch runs backward passes of bp devices have dropped all that they were given. A
// thread may keep the last pass that it worked for a moment longer than the one who asked for it waits, and Python
// objects with it; a thread that lets go of those while Python is being finalized ends the process with an error. The
// caller does not have the GIL. Does nothing where no device has been used.
void finish_autograd_threads();

// From here on the end of the process waits for the host functions that are under way, and no other one begins then.
// To be called late, since what C++ destroys at the end is destroyed in the opposite order.
void finish_host_calls_at_exit();

// A host function that a stream calls, while it runs.
class HostCall {
 public:
  HostCall() noexcept;
  ~HostCall();
  HostCall(const HostCall&) = delete;
  HostCall& operator=(const HostCall&) = delete;

  // False once the process ends: the function must not be called then.
  bool may_run() const noexcept {
    return may_run_;
  }

 private:
  bool may_run_;
};

} // namespace backplane
