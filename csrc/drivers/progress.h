// What a queue is known to have done.
#pragma once

#include <atomic>
#include <cstdint>

namespace backplane {

// Commands are numbered as they are given to the queue, which several threads may do side by side: then a command's
// number does not tell its place in the queue, and nothing is concluded from it.
class Progress {
 public:
  // Exists while a command is given.
  class Giving {
   public:
    explicit Giving(Progress& progress) : progress_(progress) {
      const uint64_t given = progress.given_.load();
      const uint64_t number = progress.started_.fetch_add(1) + 1;
      number_ = given + 1 == number ? number : 0;
    }
    ~Giving() {
      progress_.given_.fetch_add(1);
    }
    Giving(const Giving&) = delete;
    Giving& operator=(const Giving&) = delete;

    // For `reached`.
    uint64_t number() const {
      return number_;
    }

   private:
    Progress& progress_;
    uint64_t number_;
  };

  // For `reached`, of the last command.
  uint64_t last() const {
    const uint64_t given = given_.load();
    return started_.load() == given ? given : 0;
  }

  // The command of this number is done, and with it all that were given before. 0: nothing is known.
  void reached(uint64_t number) {
    uint64_t known = done_.load();
    while (known < number && !done_.compare_exchange_weak(known, number)) {
    }
  }

  // Whether all that was given is done. False also where that is not known.
  bool is_idle() const {
    return done_.load() == started_.load();
  }

 private:
  std::atomic<uint64_t> started_{0}; // commands whose giving has begun,
  std::atomic<uint64_t> given_{0}; // and ended
  std::atomic<uint64_t> done_{0}; // the first so many
};

} // namespace backplane
