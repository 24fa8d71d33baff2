#include "distributed/library_work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <utility>

namespace backplane {

LibraryWork::LibraryWork(Subject subject, std::shared_ptr<PendingCommunication> communication)
    : Work(
          communication->id().member.rank,
          subject.type,
          ("backplane:" + communication->id().name).c_str(),
          subject.inputs.empty() ? subject.outputs : subject.inputs),
      subject_(std::move(subject)),
      communication_(std::move(communication)),
      future_(
          c10::make_intrusive<c10::ivalue::Future>(
              c10::ListType::create(c10::TensorType::get()),
              std::vector<c10::Device>{c10::Device(c10::kPrivateUse1, communication_->device())})) {}

void LibraryWork::begin() {
  if (const auto end_of_event = std::exchange(recordFunctionEndCallback_, nullptr)) {
    end_of_event();
  }
  communication_->submitted().when_set(
      [future = future_, outputs = subject_.outputs, communication = &*communication_] {
        if (const auto error = communication->failure()) {
          future->setError(error);
        } else {
          future->markCompleted(c10::IValue(outputs)); // with events on the current streams
        }
      });
}

bool LibraryWork::isCompleted() {
  return communication_->is_over();
}

bool LibraryWork::isSuccess() const {
  return communication_->failure() == nullptr;
}

std::exception_ptr LibraryWork::exception() const {
  return communication_->failure();
}

bool LibraryWork::wait(std::chrono::milliseconds timeout) {
  if (timeout == kNoTimeout && !subject_.blocks_host) {
    synchronize();
  } else {
    communication_->wait_on_host(timeout);
  }
  return true;
}

void LibraryWork::synchronize() {
  communication_->block_current_stream();
}

std::vector<at::Tensor> LibraryWork::result() {
  return subject_.outputs;
}

c10::intrusive_ptr<c10::ivalue::Future> LibraryWork::getFuture() {
  return future_;
}

uint64_t LibraryWork::getSequencenumber() const {
  return communication_->id().number;
}

} // namespace backplane
