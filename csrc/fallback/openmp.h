// OpenMP's teams: the threads with which PyTorch's CPU kernels compute.
//
// Each thread that begins a parallel part has a team of its own. Where there are more threads in teams than processors, GNU's
// OpenMP lets those that wait sleep at once, which takes longer than a small part does: the step of an LSTM three times as long.
// A device's threads (PoCL has one per processor) have a team each, so that work of many small parts is better done without.
#pragma once

namespace backplane {

// Lives while a thread does the host's part in a device's work: there are more such threads, and their teams.
class AmongTeams {
 public:
  AmongTeams();
  ~AmongTeams();
  AmongTeams(const AmongTeams&) = delete;
  AmongTeams& operator=(const AmongTeams&) = delete;
  // Whether the calling thread does.
  static bool is_here();

 private:
  const bool before_;
};

// While it lives, the calling thread computes alone.
class WithoutTeam {
 public:
  WithoutTeam();
  ~WithoutTeam();
  WithoutTeam(const WithoutTeam&) = delete;
  WithoutTeam& operator=(const WithoutTeam&) = delete;

 private:
  int threads_ = 0; // that parts had before; 0: nobody knows
  int threads_of_mkl_ = 0;
};

} // namespace backplane
