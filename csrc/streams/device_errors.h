// Errors that are known only once the device is at work, and are thrown when the host next synchronizes with the stream.
//
// Kernels report theirs, an index out of range or a division by zero, in a few words of device memory. The words, their
// meaning and their text are the Python side's (torch_backplane/kernels/templates/errors.py). Here is known which streams
// were given kernels that may write them, so that nobody else pays for reading them. What the host's part in a stream's work
// raises (streams/submit.h) is kept as it is.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <exception>
#include <functional>
#include <optional>
#include <memory>
#include <string>
#include <vector>

namespace backplane {

struct ReportedError {
  bool is_index_error; // else a RuntimeError
  std::string text;
};
// What the words of an error say.
using ReadWords = std::function<ReportedError(const std::vector<int32_t>&)>;

// Sets a device's words: a tensor of int32 on it, all zero. They are the device's as long as the process lives.
void watch_error_words(const at::Tensor& words, ReadWords read);
// True for the memory of a device's words.
bool are_error_words(const at::Tensor& tensor);
// A kernel that may report an error was given to the stream.
void note_reporting_launch(c10::Stream stream);

// Something that the stream was given has failed: the stream's next synchronization throws `error`. From any thread, without
// the GIL.
void report_error(c10::Stream stream, std::exception_ptr error);

// Throws what a kernel on the stream (or on any stream of the device) has reported. The words are zero afterwards. To be
// called when the stream is synchronized. Costs nothing where no such kernel was launched.
void throw_reported_errors(c10::Stream stream);
void throw_reported_errors(c10::DeviceIndex device);

// Checks a stream around a synchronization of it: the error words are copied before, so that one wait is enough.
class ErrorCheck {
 public:
  // Submits the copy, if launches of the stream may have reported errors.
  explicit ErrorCheck(c10::Stream stream);
  // Without finish(), the launches are still to be checked.
  ~ErrorCheck();
  ErrorCheck(const ErrorCheck&) = delete;
  ErrorCheck& operator=(const ErrorCheck&) = delete;

  // When the stream has been synchronized: throws the first error, as throw_reported_errors.
  void finish();

 private:
  const c10::Stream stream_;
  std::unique_ptr<std::vector<int32_t>> words_; // null: nothing to check
};

} // namespace backplane
