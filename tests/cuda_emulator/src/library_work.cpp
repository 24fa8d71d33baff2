// What the emulated libraries (cublas.cpp, cusolver.cpp, …) need of libcuda besides its API.

#include <functional>

#include "entry.h"
#include "streams.h"

namespace {

// Work of a library. For streams and graphs, it is a kernel.
struct LibraryWork : Operation {
  explicit LibraryWork(std::function<void()> given) : work(std::move(given)) {}
  CUresult execute(Context&) override {
    work();
    return CUDA_SUCCESS;
  }
  int node_type() const override {
    return 0;
  }
  std::shared_ptr<Operation> clone() const override {
    return std::make_shared<LibraryWork>(*this);
  }

  std::function<void()> work;
};

} // namespace

// Calls the function in the order of the stream, or adds it to the graph that the stream is captured to.
API emulator_submit(CUstream handle, const std::function<void()>* work) {
  ENTER_CONTEXT();
  const auto stream = stream_of(context, handle);
  REQUIRE(stream != nullptr, CUDA_ERROR_INVALID_HANDLE);
  return submit(stream, std::make_shared<LibraryWork>(*work));
}

// For what allocates memory or waits in NVIDIA's library: returns an error if a capture forbids that.
API emulator_prepare() {
  ENTER_CONTEXT();
  return refuse_during_capture();
}
