#include "fallback/openmp.h"

#include <ATen/Parallel.h>

// PyTorch's OpenMP and MKL, if it has them.
extern "C" {
__attribute__((weak)) void omp_set_num_threads(int count);
__attribute__((weak)) int MKL_Set_Num_Threads_Local(int count); // 0: as many as in all threads; returns what was set
}

namespace backplane {
namespace {

thread_local bool among_teams = false;

} // namespace

AmongTeams::AmongTeams() : before_(among_teams) {
  among_teams = true;
}

AmongTeams::~AmongTeams() {
  among_teams = before_;
}

bool AmongTeams::is_here() {
  return among_teams;
}

WithoutTeam::WithoutTeam() {
  if (omp_set_num_threads != nullptr) {
    threads_ = at::get_num_threads(); // which the first call in each thread sets
    omp_set_num_threads(1);
  }
  if (MKL_Set_Num_Threads_Local != nullptr) {
    threads_of_mkl_ = MKL_Set_Num_Threads_Local(1);
  }
}

WithoutTeam::~WithoutTeam() {
  if (threads_ > 0) {
    omp_set_num_threads(threads_);
  }
  if (MKL_Set_Num_Threads_Local != nullptr) {
    MKL_Set_Num_Threads_Local(threads_of_mkl_);
  }
}

} // namespace backplane
