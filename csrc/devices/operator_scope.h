// The operator that this thread runs, for messages about its use of streams and memory.
#pragma once

#include <string>

namespace backplane {

// Only the outermost scope counts: its operator is the one that the program called.
class OperatorScope {
 public:
  explicit OperatorScope(const std::string& name) noexcept : is_outermost_(outermost_ == nullptr) {
    if (is_outermost_) {
      outermost_ = &name;
    }
  }
  ~OperatorScope() {
    if (is_outermost_) {
      outermost_ = nullptr;
    }
  }
  OperatorScope(const OperatorScope&) = delete;
  OperatorScope& operator=(const OperatorScope&) = delete;

  // Empty if no operator runs.
  static std::string name() {
    return outermost_ != nullptr ? *outermost_ : std::string();
  }

 private:
  static inline thread_local const std::string* outermost_ = nullptr;
  const bool is_outermost_;
};

} // namespace backplane
