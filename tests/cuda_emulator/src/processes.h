// Commands, and temporary folders.

#pragma once

#include <string>
#include <vector>

class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;

  std::string path(const std::string& name) const {
    return folder_ + "/" + name;
  }
  // Writes a file, and makes the folders above it.
  void write(const std::string& name, const std::string& text) const;

 private:
  std::string folder_;
};

// Runs a command, and stores its output and error output. Returns its exit status, or -1 if it cannot be started.
int run_command(const std::vector<std::string>& command, std::string* output);
