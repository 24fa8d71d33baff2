#include "processes.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

extern char** environ;

TemporaryFolder::TemporaryFolder() {
  std::string name = (std::filesystem::temp_directory_path() / "emulated-nvrtc-XXXXXX").string();
  folder_ = mkdtemp(name.data());
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

void TemporaryFolder::write(const std::string& name, const std::string& text) const {
  const std::filesystem::path file = path(name);
  std::filesystem::create_directories(file.parent_path());
  std::ofstream(file, std::ios::binary) << text;
}

int run_command(const std::vector<std::string>& command, std::string* output) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    return -1;
  }
  std::vector<char*> arguments;
  for (const std::string& one : command) {
    arguments.push_back(const_cast<char*>(one.c_str()));
  }
  arguments.push_back(nullptr);
  // A preloaded library is not for the compiler, and no cache finds a program that is linked.
  char without_ccache[] = "CCACHE_DISABLE=1";
  std::vector<char*> variables{without_ccache};
  for (char** one = environ; *one != nullptr; ++one) {
    if (strncmp(*one, "LD_PRELOAD=", strlen("LD_PRELOAD=")) != 0) {
      variables.push_back(*one);
    }
  }
  variables.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 2);
  pid_t child = -1;
  const int error = posix_spawnp(&child, arguments[0], &actions, nullptr, arguments.data(), variables.data());
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  char part[4096];
  for (ssize_t got; error == 0 && (got = read(ends[0], part, sizeof part)) > 0;) {
    output->append(part, static_cast<size_t>(got));
  }
  close(ends[0]);
  int status = -1;
  return error != 0 || waitpid(child, &status, 0) != child ? -1 : WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}
