// Errors that occur while commands execute. The host's next synchronization with the stream throws them.
//
// Kernels report an index out of range or a division by zero in a few words of device memory. Python defines the words,
// their meaning and the error texts (torch_backplane/kernels/templates/errors.py). This file tracks the streams with
// kernels that can write the words, so that only they pay for reading them. Exceptions of host callbacks
// (streams/submit.h) are stored and rethrown.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace backplane {

struct ReportedError {
  bool is_index_error; // else a RuntimeError
  std::string text;
};
// Decodes the words of an error.
using ReadWords = std::function<ReportedError(const std::vector<int32_t>&)>;

// Sets the error words of a device: an int32 tensor of zeros on it, which is in use until the process ends.
void watch_error_words(const at::Tensor& words, ReadWords read);
// True if the tensor is in the memory of its device's error words.
bool are_error_words(const at::Tensor& tensor);
// Notes that a kernel that can report an error was submitted to the stream.
void note_reporting_launch(c10::Stream stream);

// A command of the stream has failed: the stream's next synchronization throws `error`. Can be called from any thread,
// without the GIL.
void report_error(c10::Stream stream, std::exception_ptr error);

// Throws the first error that was reported for the stream (or for any stream of the device), and clears the words. Must
// be called when the stream is synchronized. Costs only a load if there is nothing to check.
void throw_reported_errors(c10::Stream stream);
void throw_reported_errors(c10::DeviceIndex device);

// Checks a stream around its synchronization: the error words are copied before, so that one wait is enough.
class ErrorCheck {
 public:
  // Submits the copy if launches of the stream can have reported errors.
  explicit ErrorCheck(c10::Stream stream);
  // Without finish(), the next synchronization checks the launches.
  ~ErrorCheck();
  ErrorCheck(const ErrorCheck&) = delete;
  ErrorCheck& operator=(const ErrorCheck&) = delete;

  // Must be called when the stream has been synchronized. Throws the first error, like throw_reported_errors.
  void finish();

 private:
  const c10::Stream stream_;
  std::unique_ptr<std::vector<int32_t>> words_; // nullptr: nothing to check
};

} // namespace backplane
