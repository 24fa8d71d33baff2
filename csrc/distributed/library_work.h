// The c10d Work of a collective of a communication library.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <vector>

#include "distributed/pending_communication.h"

namespace backplane {

class LibraryWork final : public c10d::Work {
 public:
  // What a Work knows of a Communication.
  struct Subject {
    c10d::OpType type;
    std::vector<at::Tensor> outputs, inputs;
    bool blocks_host;
  };

  LibraryWork(Subject subject, std::shared_ptr<PendingCommunication> communication);

  // Must be called once, by the issuing thread, before the communication is submitted. Ends the event in profiles,
  // because the communication can be submitted after the profile. The Future ends with the submission.
  void begin();

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  // Makes the current stream of the tensors' device wait. With a timeout, or for a barrier, the host waits.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;

 private:
  const Subject subject_;
  const std::shared_ptr<PendingCommunication> communication_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

} // namespace backplane
