#include "c10/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Utils.h>
#include <ATen/core/PhiloxRNGEngine.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <array>
#include <cstring>
#include <mutex>

#include "devices/device.h"
#include "streams/capture.h"
#include "streams/stream.h"

namespace backplane {
namespace {

// Each replay draws from the generator's state at that time. Its state during the capture is unrelated to those
// numbers.
void check_not_capturing(c10::DeviceIndex index) {
  if (const auto capture = Capture::of(current_stream(index))) {
    capture->refuse("it reads or sets the state of a random generator");
  }
}

} // namespace

PhiloxGenerator::PhiloxGenerator(c10::DeviceIndex index) : PhiloxGenerator(index, std::make_shared<State>()) {}

PhiloxGenerator::PhiloxGenerator(c10::DeviceIndex index, std::shared_ptr<State> state)
    : c10::GeneratorImpl(c10::Device(c10::kPrivateUse1, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      state_(std::move(state)) {}

void PhiloxGenerator::set_current_seed(uint64_t seed) {
  check_not_capturing(device().index());
  *state_ = State{seed, 0};
}

uint64_t PhiloxGenerator::current_seed() const {
  return state_->seed;
}

uint64_t PhiloxGenerator::seed() {
  const uint64_t random = c10::detail::getNonDeterministicRandom(/*is_cuda=*/true);
  set_current_seed(random);
  return random;
}

void PhiloxGenerator::set_offset(uint64_t offset) {
  check_not_capturing(device().index());
  TORCH_CHECK(offset % 4 == 0, "the offset of a bp generator must be a multiple of 4, but got ", offset);
  state_->offset = offset;
}

uint64_t PhiloxGenerator::get_offset() const {
  check_not_capturing(device().index());
  return state_->offset;
}

void PhiloxGenerator::set_state(const c10::TensorImpl& state) {
  at::detail::check_rng_state(state);
  TORCH_CHECK(
      state.numel() == sizeof(State), "RNG state is wrong size: expected ", sizeof(State), " bytes, but got ",
      state.numel());
  State read;
  std::memcpy(&read, state.data_dtype_initialized<uint8_t>(), sizeof(State));
  set_offset(read.offset); // checks it
  state_->seed = read.seed;
}

c10::intrusive_ptr<c10::TensorImpl> PhiloxGenerator::get_state() const {
  check_not_capturing(device().index());
  auto tensor = at::empty({sizeof(State)}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
  std::memcpy(tensor.data_ptr<uint8_t>(), state_.get(), sizeof(State));
  return tensor.getIntrusivePtr();
}

void PhiloxGenerator::graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) {
  auto* philox = dynamic_cast<PhiloxGenerator*>(other.get());
  TORCH_CHECK(philox != nullptr, "the state of a bp generator can only be set from another bp generator");
  state_ = philox->state_;
}

c10::intrusive_ptr<c10::GeneratorImpl> PhiloxGenerator::graphsafe_get_state() const {
  return c10::intrusive_ptr<PhiloxGenerator>::reclaim(new PhiloxGenerator(device().index(), state_));
}

PhiloxGenerator::State PhiloxGenerator::advance(uint64_t count) {
  const State before = *state_;
  state_->offset += taken(count);
  return before;
}

PhiloxGenerator* PhiloxGenerator::clone_impl() const {
  return new PhiloxGenerator(device().index(), std::make_shared<State>(*state_));
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* generators = new std::array<at::Generator, 64>;
  static std::mutex lock;
  index = checked_index(index);
  at::Generator& generator = (*generators)[index];
  std::lock_guard<std::mutex> guard(lock);
  if (!generator.defined()) {
    generator = at::make_generator<PhiloxGenerator>(index);
    generator.seed(); // random until manual_seed, as in torch.cuda
  }
  return generator;
}

at::Generator source_generator(const std::optional<at::Generator>& given, c10::DeviceIndex index) {
  at::Generator source = given.has_value() && given->defined() ? *given : default_generator(index);
  TORCH_CHECK(
      source.device().type() == c10::kPrivateUse1, "Expected a 'bp' device type for generator but found '",
      source.device().type(), "'");
  return source;
}

at::Generator cpu_generator(PhiloxGenerator::State state) {
  // Philox fills the whole state of the Mersenne Twister, so that two calls share no numbers: the Twister's own seeding
  // keeps only 32 bits. (seed, offset / 4) identifies the call; the Philox counter runs over the words of the state.
  at::Philox4_32 philox(state.seed, /*subsequence=*/state.offset / 4);
  at::mt19937_data_pod words{};
  words.seed_ = state.seed;
  words.left_ = 1; // generate new numbers at the first call
  words.seeded_ = true;
  for (auto& word : words.state_) {
    word = philox();
  }
  words.state_[0] |= 0x80000000u; // an all-zero state would stay zero
  at::mt19937 engine;
  engine.set_data(words);
  static thread_local at::Generator cpu = at::make_generator<at::CPUGeneratorImpl>();
  auto* impl = cpu.get<at::CPUGeneratorImpl>();
  std::lock_guard<std::mutex> guard(impl->mutex_);
  impl->set_engine(engine);
  impl->set_next_float_normal_sample(std::nullopt);
  impl->set_next_double_normal_sample(std::nullopt);
  return cpu;
}

} // namespace backplane
