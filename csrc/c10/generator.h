// The random number generator of one bp device: Philox, as on GPUs. Its whole state is a seed and an offset.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

#include <memory>

#include "devices/device.h"

namespace backplane {

class PhiloxGenerator final : public c10::GeneratorImpl {
 public:
  struct State {
    uint64_t seed = c10::default_rng_seed_val;
    uint64_t offset = 0; // counts 32-bit numbers; a multiple of 4
  };

  explicit PhiloxGenerator(c10::DeviceIndex index);

  void set_current_seed(uint64_t seed) override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  // 16 bytes: seed, then offset, both 64-bit little-endian, as in torch.cuda.
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override;
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override;

  // Reserves `count` numbers for one operator: returns the current state, then advances the offset by taken(count).
  // The caller holds mutex_.
  State advance(uint64_t count);
  // The offset increment for `count` numbers: `count` rounded up to a multiple of 4.
  static uint64_t taken(uint64_t count) {
    return (count + 3) / 4 * 4;
  }

  static c10::DeviceType device_type() {
    return c10::kPrivateUse1;
  }

 private:
  PhiloxGenerator(c10::DeviceIndex index, std::shared_ptr<State> state);
  PhiloxGenerator* clone_impl() const override;

  std::shared_ptr<State> state_; // shared with the generators that graphsafe_get_state returned
};

// The generator that operators on bp:`index` use when none is given (-1: the current device).
const at::Generator& default_generator(c10::DeviceIndex index);

// The generator that an operator on bp:`index` draws from: the given one, or the device's default one. Throws if the
// given one belongs to another device type.
at::Generator source_generator(const std::optional<at::Generator>& given, c10::DeviceIndex index);

// The offset increment for a CPU kernel that runs for bp, however many numbers it draws.
inline constexpr uint64_t kCpuDraw = 4;

// A CPU generator whose state is derived from `state`, for a CPU kernel that runs for a bp device. Valid until the
// calling thread calls this function again.
at::Generator cpu_generator(PhiloxGenerator::State state);

} // namespace backplane
