// OpenMP's teams: the threads with which PyTorch's CPU kernels compute.
//
// Each thread that begins a parallel part has a team of its own. Where there are more threads in teams than processors, GNU's
// OpenMP lets those that wait for others sleep at once, in all teams of the process, and what has many small parts takes three
// times as long. So one thread begins the parallel parts of the work that streams give to the host, whichever thread of the
// device's comes to it (PoCL has one per processor). To wake that thread, and its team, takes longer than small work does, which
// is computed by one thread, where it is.
#pragma once

#include <cstdint>
#include <functional>

namespace backplane {

// Runs it in the thread that has the team, of so many threads, and waits; at once where that is the calling thread. `function`
// throws nothing, and waits for nobody who waits for that thread.
void run_with_team(int threads, const std::function<void()>& function);

// Ends the team that the calling thread itself may have: the next parallel part makes another one.
void give_up_team();

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

// Calls it with 0 to count - 1, side by side where the calling thread may use several threads, and waits. Each call computes
// alone. What calls throw is thrown here, of the first that threw.
void run_side_by_side(int64_t count, const std::function<void(int64_t)>& function);

// Runs it with so many threads, and waits: with more than one as run_with_team, with one here and alone; 0 is its own choice, here.
void run_with_threads(int threads, const std::function<void()>& function);

} // namespace backplane
