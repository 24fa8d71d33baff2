#include "devices/openmp.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

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

thread_local bool has_the_team = false; // whether this is the thread of ThreadWithTeam

class ThreadWithTeam {
 public:
  // Of the process, which ends without it.
  static ThreadWithTeam& instance() {
    static auto* one = new ThreadWithTeam;
    return *one;
  }

  void run(int threads, const std::function<void()>& function) {
    if (has_the_team) {
      compute(threads, function);
      return;
    }
    Task task(threads, function);
    std::unique_lock<std::mutex> guard(lock_);
    tasks_.push_back(&task);
    given_.notify_one();
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
    std::thread([this] { loop(); }).detach();
  }

  static void compute(int threads, const std::function<void()>& function) {
    if (omp_set_num_threads != nullptr && at::get_num_threads() != threads) {
      omp_set_num_threads(threads);
    }
    function();
  }

  [[noreturn]] void loop() {
    has_the_team = true;
    std::unique_lock<std::mutex> guard(lock_);
    for (;;) {
      given_.wait(guard, [&] { return !tasks_.empty(); });
      Task& task = *tasks_.front();
      tasks_.pop_front();
      guard.unlock();
      compute(task.threads, task.function);
      guard.lock();
      task.is_done = true;
      task.done.notify_one(); // under the lock: the task is gone once its thread sees that it is done
    }
  }

  std::mutex lock_;
  std::condition_variable given_;
  std::deque<Task*> tasks_;
};

// Calls of one function, which whoever comes takes one by one.
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
        all_ended_.notify_one();
      }
    }
  }

  // For what others have taken. Throws what the first that threw has thrown.
  void wait() {
    std::unique_lock<std::mutex> guard(lock_);
    all_ended_.wait(guard, [&] { return ended_ == count_; });
    for (const auto& error : errors_) {
      if (error) {
        std::rethrow_exception(error);
      }
    }
  }

 private:
  const int64_t count_;
  const std::function<void(int64_t)>& function_; // of who waits: nobody calls it after the last has ended
  std::vector<std::exception_ptr> errors_;
  std::atomic<int64_t> next_{0};
  std::mutex lock_;
  std::condition_variable all_ended_;
  int64_t ended_ = 0;
};

// Threads that take calls beside who has them to do. They sleep when they have none, as OpenMP's do not: those run in a circle
// for some milliseconds. In a forked process there are none.
class Helpers {
 public:
  // Of the process, which ends without them.
  static Helpers& instance() {
    static auto* one = new Helpers;
    return *one;
  }

  void ask(const std::shared_ptr<Calls>& calls, int64_t helpers) {
    {
      const std::lock_guard<std::mutex> guard(lock_);
      for (; threads_ < helpers; ++threads_) {
        std::thread([this] { loop(); }).detach();
      }
      asked_.insert(asked_.end(), helpers, calls);
    }
    given_.notify_all();
  }

 private:
  [[noreturn]] void loop() {
    for (;;) {
      std::shared_ptr<Calls> calls;
      {
        std::unique_lock<std::mutex> guard(lock_);
        given_.wait(guard, [&] { return !asked_.empty(); });
        calls = std::move(asked_.front());
        asked_.pop_front();
      }
      calls->take();
    }
  }

  std::mutex lock_;
  std::condition_variable given_;
  std::deque<std::shared_ptr<Calls>> asked_;
  int64_t threads_ = 0;
};

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
  const auto calls = std::make_shared<Calls>(count, function);
  const auto threads = std::min<int64_t>(count, at::get_num_threads());
  if (threads > 1 && !at::in_parallel_region()) {
    // On the processors that a device's own threads want, OpenMP's would run in a circle; a program's thread, which computes
    // everything with its team, has them awake anyhow.
    if (GOMP_parallel == nullptr || has_the_team) {
      Helpers::instance().ask(calls, threads - 1);
    } else {
      GOMP_parallel([](void* taken) { static_cast<Calls*>(taken)->take(); }, calls.get(), static_cast<unsigned>(threads), 0);
    }
  }
  calls->take();
  calls->wait();
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
