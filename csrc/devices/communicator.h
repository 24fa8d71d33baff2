// Collective communication of devices of several processes by a library such as NCCL.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace backplane {

enum class Reduction : uint8_t { Sum, Product, Max, Min, Average, ScaledSum };

// What one rank does in a collective, or a part of it.
struct CommunicationStep {
  enum class Kind : uint8_t { AllGather, AllReduce, Broadcast, Receive, Reduce, ReduceScatter, Send };

  Kind kind;
  const void* from; // device addresses; null: this rank sends, or receives, nothing
  void* to;
  size_t count; // elements of `from`; of `to` for ReduceScatter
  c10::ScalarType dtype = c10::kByte; // steps that only move data move bytes
  int peer = -1; // Broadcast, Reduce: the root; Send, Receive: the other rank
  Reduction reduction = Reduction::Sum;
  double factor = 1; // of this rank for ScaledSum
  const void* factor_memory = nullptr; // if set, the factor in device memory, a number of the dtype
};

// The membership of this process in a group of ranks, for one device. Thread-safe.
class Communicator {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  virtual ~Communicator() = default;
  // Submits the steps, which can run at the same time, to a native queue of the device. Waits first until all ranks
  // have joined. Throws if the library fails, after abort(), and at the deadline; then only abort() may be called.
  virtual void enqueue(c10::ArrayRef<CommunicationStep> steps, uintptr_t queue, Deadline deadline) = 0;
  // The error that has occurred since the steps were submitted; empty if there is none.
  virtual std::string failure() = 0;
  // Ends the pending steps, whose results are undefined then, and calls in other threads.
  virtual void abort() noexcept = 0;
  // Leaves the group when all steps have run. Throws like enqueue().
  virtual void finish(Deadline deadline) = 0;
};

// A communication library for one device.
class CommunicationLibrary {
 public:
  // `name`: with its version, for messages. `place`: identifies the hardware among all devices of all machines.
  CommunicationLibrary(std::string name, std::string place) : name_(std::move(name)), place_(std::move(place)) {}
  virtual ~CommunicationLibrary() = default;

  const std::string& name() const {
    return name_;
  }
  // Devices of two ranks must not have the same place.
  const std::string& place() const {
    return place_;
  }
  // Makes the identifier of a group, which all its ranks pass to join().
  virtual std::string make_id() = 0;
  // Starts to join a group. Does not wait for the other ranks.
  virtual std::unique_ptr<Communicator> join(const std::string& id, int rank, int size) = 0;

 private:
  const std::string name_;
  const std::string place_;
};

} // namespace backplane
