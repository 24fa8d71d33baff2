#include "devices/openmp.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif

// PyTorch's OpenMP and MKL, if it has them.
extern "C" {
__attribute__((weak)) void omp_set_num_threads(int count);
// LLVM's has it too.
__attribute__((weak)) void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags);
__attribute__((weak)) int omp_pause_resource_all(int kind);
__attribute__((weak)) void __kmpc_fork_call(void*, int, void*, ...); // LLVM's and Intel's, which pause all teams at once
__attribute__((weak)) int MKL_Set_Num_Threads_Local(int count); // 0: as many as in all threads; returns what was set
}

namespace backplane {
namespace {

constexpr int kSoftPause = 1; // omp_pause_soft

// The processors that threads of a team have woken up on. Two may have woken on one while another is idle, and Linux may leave them
// there for a tenth of a second, in which they take turns of milliseconds: who waits for the other runs in a circle.
class WokenOn {
 public:
  void nobody() {
#ifdef __linux__
    CPU_ZERO(&taken_);
#endif
  }

  // The calling thread has woken: moves it if it is where another one is, to where none is, if it may go there.
  void come() {
#ifdef __linux__
    int processor = sched_getcpu();
    if (processor < 0 || processor >= CPU_SETSIZE) {
      return;
    }
    if (CPU_ISSET(processor, &taken_)) {
      cpu_set_t allowed;
      if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
        return;
      }
      const int own = processor;
      do {
        processor = (processor + 1) % CPU_SETSIZE;
      } while (processor != own && (CPU_ISSET(processor, &taken_) || !CPU_ISSET(processor, &allowed)));
      if (processor != own) {
        cpu_set_t wanted;
        CPU_ZERO(&wanted);
        CPU_SET(processor, &wanted);
        sched_setaffinity(0, sizeof(wanted), &wanted);
        sched_setaffinity(0, sizeof(allowed), &allowed); // it may go on from there
      }
    }
    CPU_SET(processor, &taken_);
#endif
  }

 private:
#ifdef __linux__
  cpu_set_t taken_;
#endif
};

class ThreadWithTeam {
 public:
  // Of the process, which ends without it.
  static ThreadWithTeam& instance() {
    static auto* one = new ThreadWithTeam;
    return *one;
  }

  void run(int threads, const std::function<void()>& function) {
    if (std::this_thread::get_id() == thread_) {
      compute(threads, function);
      return;
    }
    Task task(threads, function);
    std::unique_lock<std::mutex> guard(lock_);
    tasks_.push_back(&task);
    given_.notify_all();
    task.done.wait(guard, [&] { return task.is_done; });
  }

 private:
  struct Task {
    Task(int team, const std::function<void()>& given) : threads(team), function(given) {}
    const int threads;
    const std::function<void()>& function;
    std::condition_variable done;
    bool is_done = false;
  };

  ThreadWithTeam() {
    std::thread thread([this] { loop(); });
    thread_ = thread.get_id();
    thread.detach();
  }

  static void compute(int threads, const std::function<void()>& function) {
    if (omp_set_num_threads != nullptr && at::get_num_threads() != threads) {
      omp_set_num_threads(threads);
    }
    function();
  }

  [[noreturn]] void loop() {
    bool has_team = false;
    for (;;) {
      // OpenMP's threads run in a circle for milliseconds once they have nothing to do, on processors that the device's threads
      // want between parts of the host's. So they sleep with this one, in a parallel part that ends when there is a task.
      {
        const std::lock_guard<std::mutex> guard(lock_);
        woken_on_.nobody();
      }
      if (has_team && GOMP_parallel != nullptr) {
        GOMP_parallel([](void* self) { static_cast<ThreadWithTeam*>(self)->sleep(); }, this, /*threads=*/0, /*flags=*/0);
      } else {
        sleep();
      }
      std::unique_lock<std::mutex> guard(lock_);
      Task& task = *tasks_.front();
      tasks_.pop_front();
      guard.unlock();
      compute(task.threads, task.function);
      has_team = task.threads > 1;
      guard.lock();
      task.is_done = true;
      task.done.notify_one(); // under the lock: the task is gone once its thread sees that it is done
    }
  }

  // Until there is a task, which stays as long as any thread sleeps.
  void sleep() {
    std::unique_lock<std::mutex> guard(lock_);
    given_.wait(guard, [&] { return !tasks_.empty(); });
    woken_on_.come();
  }

  std::thread::id thread_;
  std::mutex lock_;
  std::condition_variable given_;
  std::deque<Task*> tasks_;
  WokenOn woken_on_; // under the lock
};

// Calls of one function, which a team's threads take one by one. A thread that finds none left sleeps until the last one has
// ended: at the end of a parallel part OpenMP's run in a circle, on a processor that the last call may be waiting for.
class Calls {
 public:
  Calls(int64_t count, const std::function<void(int64_t)>& function) : count_(count), function_(function), errors_(count) {}

  void take() {
    for (int64_t i = next_.fetch_add(1); i < count_; i = next_.fetch_add(1)) {
      const WithoutTeam alone;
      try {
        function_(i);
      } catch (...) {
        errors_[i] = std::current_exception();
      }
      const std::lock_guard<std::mutex> guard(lock_);
      if (++ended_ == count_) {
        all_ended_.notify_all();
      }
    }
    std::unique_lock<std::mutex> guard(lock_);
    all_ended_.wait(guard, [&] { return ended_ == count_; });
  }

  // After `take`: throws what the first that threw has thrown.
  void end() const {
    for (const auto& error : errors_) {
      if (error) {
        std::rethrow_exception(error);
      }
    }
  }

 private:
  const int64_t count_;
  const std::function<void(int64_t)>& function_;
  std::vector<std::exception_ptr> errors_;
  std::atomic<int64_t> next_{0};
  std::mutex lock_;
  std::condition_variable all_ended_;
  int64_t ended_ = 0;
};

// Where a parallel part begins and ends OpenMP orders what is done before, in it and after. ThreadSanitizer does not see that in
// OpenMP's own code, and sees this.
std::atomic<uint64_t> orders{0};

} // namespace

void run_with_team(int threads, const std::function<void()>& function) {
  ThreadWithTeam::instance().run(threads, function);
}

void give_up_team() {
  if (omp_pause_resource_all != nullptr && __kmpc_fork_call == nullptr) {
    omp_pause_resource_all(kSoftPause);
  }
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

void run_side_by_side(int64_t count, const std::function<void(int64_t)>& function) {
  Calls calls(count, function);
  const auto threads = std::min<int64_t>(count, at::get_num_threads());
  if (GOMP_parallel != nullptr && threads > 1 && !at::in_parallel_region()) {
    const auto take = [](void* taken) {
      ++orders;
      static_cast<Calls*>(taken)->take();
      ++orders;
    };
    ++orders;
    GOMP_parallel(take, &calls, static_cast<unsigned>(threads), /*flags=*/0);
    ++orders;
  } else {
    calls.take();
  }
  calls.end();
}

void run_with_threads(int threads, const std::function<void()>& function) {
  if (threads > 1) {
    run_with_team(threads, function);
  } else if (threads == 1) {
    const WithoutTeam alone;
    function();
  } else {
    function();
  }
}

} // namespace backplane
