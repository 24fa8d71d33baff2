#include "aten/winograd.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <utility>

#include "aten/winograd_transforms.h"
#include "devices/openmp.h"

namespace backplane::winograd {

using at::Tensor;

namespace {

Images images_of(const Tensor& tensor) {
  return {tensor.size(0), tensor.size(1), tensor.size(2), tensor.size(3)};
}

Range part(int64_t count, int64_t parts, int64_t i) {
  return {count * i / parts, count * (i + 1) / parts};
}

// Rows of tiles in parts whose numbers fit a processor's cache; where there are many, each thread has several.
struct Parts {
  explicit Parts(const Tiles& tiles) : rows(tiles.rows), in_row(tiles.in_row) {
    constexpr int64_t kMost = 64, kLeast = 32, kOfThread = 4; // tiles, and parts
    const int64_t tiles_in_all = rows * in_row, threads = at::get_num_threads();
    const int64_t wanted = std::max((tiles_in_all + kMost - 1) / kMost, std::min(kOfThread * threads, tiles_in_all / kLeast));
    count = std::min(up_to(wanted, threads), rows);
  }
  Range operator[](int64_t i) const {
    return part(rows, count, i);
  }
  int64_t most_tiles() const {
    return (rows + count - 1) / count * in_row;
  }
  int64_t rows, in_row, count;
};

} // namespace

bool takes(const Tensor& input, const Tensor& weight, const Settings& settings) {
  const auto are = [](at::IntArrayRef numbers, int64_t one) {
    return std::all_of(numbers.begin(), numbers.end(), [&](int64_t number) { return number == one; });
  };
  const auto is_ours = [](const Tensor& one) {
    return one.dim() == 4 && one.scalar_type() == at::kFloat && one.is_contiguous() && one.numel() > 0 &&
        one.suggest_memory_format() == at::MemoryFormat::Contiguous; // both, with sizes of one
  };
  if (!is_ours(input) || !is_ours(weight) || input.size(1) != weight.size(1) || !are(weight.sizes().slice(2), 3) ||
      settings.transposed || settings.groups != 1 || !are(settings.stride, 1) || !are(settings.dilation, 1)) {
    return false;
  }
  for (const int64_t padding : settings.padding) {
    if (padding < 0 || padding > 2) { // gradients have 2 less this much
      return false;
    }
  }
  const auto [images, channels, height, width] = sizes_of_results(input, weight, settings.padding);
  return height > 0 && width > 0 && is_available();
}

std::array<int64_t, 4> sizes_of_results(const Tensor& input, const Tensor& weight, at::IntArrayRef padding) {
  return {
      input.size(0), weight.size(0), input.size(2) + 2 * padding.front() - 2, input.size(3) + 2 * padding.back() - 2};
}

// Measured with AVX-512 and two threads (docs/measurements.md), in nanoseconds of one.
bool pays(Direction direction, const Tensor& input, const Tensor& weight, at::IntArrayRef padding) {
  const bool of_weight = direction == Direction::kGradientOfWeight, of_input = direction == Direction::kGradientOfInput;
  const Images given = images_of(input);
  const auto [count, made_channels, height, width] = sizes_of_results(input, weight, padding);
  const Images results{count, made_channels, height, width};
  const Images &from = of_input ? results : given, &to = of_input ? given : results;
  const Tiles tiles(to, 0, 0);
  const auto channels = static_cast<double>(from.channels), made = static_cast<double>(to.channels);
  const double windows = channels * made;
  const double rows = static_cast<double>(tiles.rows);
  const double in_all = rows * static_cast<double>(tiles.in_row);
  const double registers = rows * static_cast<double>((tiles.in_row + kLanes - 1) / kLanes);

  constexpr double kMultiplication = 0.0082, kProduct = 150; // of blocks
  constexpr double kManyWindows = 1 << 17; // that are in no cache any more
  const bool is_large = windows > kManyWindows;
  const double columns = of_weight ? static_cast<double>(up_to(from.channels, kLanes)) : channels;
  const double products = kPoints * (columns * made * in_all * kMultiplication * (is_large ? 1.25 : 1) +
                                     kProduct * static_cast<double>(Parts(tiles).count));
  const double images = registers * (of_weight ? 30 * channels + 20 * made : 19 * channels + 10 * made);
  const double of_windows = windows * (of_input ? (is_large ? 9 : 2.6) : of_weight ? 2.6 : 1.8);

  // oneDNN's multiplies, and brings all operands and results in orders of its own.
  const auto places = static_cast<double>(count * height * width);
  const double numbers = static_cast<double>(input.numel()) + places * static_cast<double>(made_channels);
  const double multiplications = places * windows * kTaps;
  const double direct = multiplications * (of_weight ? 0.0089 : 0.0079) + 0.3 * (numbers + windows * kTaps);
  return products + images + of_windows < 0.9 * direct;
}

#if defined(__x86_64__)

using at::native::cpublas::brgemm;

namespace {

// Numbers between the beginnings of matrices of so many. At a distance of a power of two, as sizes mostly are, what all of them
// have at one place would be at one place of the cache.
int64_t with_gap(int64_t numbers) {
  return up_to(numbers + kLanes, 1024) + 80;
}

float* numbers(const Tensor& tensor) {
  return tensor.data_ptr<float>();
}

// Memory for a convolution, which the calling thread keeps for the next.
class Workspace {
 public:
  Workspace() = default;
  ~Workspace() {
    release();
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  static float* of_numbers(int64_t numbers) {
    static thread_local Workspace one;
    return one.grown_to(static_cast<size_t>(numbers) * sizeof(float));
  }

 private:
  static constexpr size_t kHugePage = 2 << 20;

  float* grown_to(size_t bytes) {
    if (bytes > bytes_) {
      release();
      bytes = static_cast<size_t>(up_to(static_cast<int64_t>(bytes), kHugePage));
      memory_ = std::aligned_alloc(kHugePage, bytes);
      TORCH_CHECK_WITH(OutOfMemoryError, memory_ != nullptr, "the host has no ", bytes, " bytes for a convolution");
      bytes_ = bytes;
      madvise(memory_, bytes, MADV_HUGEPAGE); // goes on without where it cannot be
    }
    return static_cast<float*>(memory_);
  }
  void release() {
    std::free(memory_);
    memory_ = nullptr;
    bytes_ = 0;
  }

  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

int64_t rooms_for(int64_t count) {
  return std::min<int64_t>(count, at::get_num_threads());
}

// Each thread takes the next of them when it has done one; it has a room of so many numbers, one of rooms_for(count).
void in_rooms(
    int64_t count, float* rooms, int64_t numbers_of_room, const std::function<void(int64_t, float*)>& function) {
  std::atomic<int64_t> next{0};
  run_side_by_side(rooms_for(count), [&](int64_t room) {
    for (int64_t i = next++; i < count; i = next++) {
      function(i, rooms + room * numbers_of_room);
    }
  });
}

// Some of so many rows in each thread.
void in_threads(int64_t rows, const std::function<void(Range)>& function) {
  const int64_t pieces = std::min<int64_t>(rows, at::get_num_threads());
  run_side_by_side(pieces, [&](int64_t i) { function(part(rows, pieces, i)); });
}

// out = windows over the images + bias; `of_input`: the images are gradients of results, and windows are turned round.
bool convolve(
    const Tensor& input,
    const Tensor& weight,
    const float* bias,
    int64_t above,
    int64_t left,
    bool of_input,
    const Tensor& out) {
  const Images from = images_of(input), to = images_of(out);
  const int64_t rows = to.channels, depth = from.channels;
  const Tiles tiles(to, above, left);
  const Parts parts(tiles);
  const int64_t image_step = with_gap(depth * parts.most_tiles()), result_step = with_gap(rows * parts.most_tiles());
  const int64_t of_weights = kPoints * with_gap(rows * depth), of_room = kPoints * (image_step + result_step);
  float* workspace = Workspace::of_numbers(of_weights + rooms_for(parts.count) * of_room);
  const Matrices weights{workspace, with_gap(rows * depth), depth};
  in_threads(rows, [&](Range some) {
    if (of_input) {
      transform_weight_turned(numbers(weight), depth, some, rows, weights);
    } else {
      transform_weight(numbers(weight), some, depth, weights);
    }
  });
  std::atomic<bool> is_finite{true};
  in_rooms(parts.count, workspace + of_weights, of_room, [&](int64_t i, float* room) {
    const int64_t columns = parts[i].count() * tiles.in_row;
    const Matrices images{room, image_step, columns}, results{room + kPoints * image_step, result_step, columns};
    transform_images(numbers(input), from, tiles, parts[i], images);
    for (int64_t point = 0; point < kPoints; ++point) {
      brgemm(
          rows, columns, depth, weights.pitch, images.pitch, results.pitch, /*add_C=*/false,
          weights.first + point * weights.step, images.first + point * images.step, results.first + point * results.step);
    }
    if (!transform_results(numbers(out), to, tiles, parts[i], results, bias)) {
      is_finite = false;
    }
  });
  return is_finite;
}

} // namespace

bool is_available() {
  if (!at::globalContext().userEnabledMkldnn()) { // products of blocks are oneDNN's
    return false;
  }
  static const bool found = [] {
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq")) {
      return false;
    }
    try {
      const float a[kLanes] = {}, b[kLanes * kLanes] = {};
      float c[kLanes];
      brgemm(1, kLanes, kLanes, kLanes, kLanes, kLanes, /*add_C=*/false, a, b, c);
      return true;
    } catch (const c10::Error&) { // this PyTorch was built without them
      return false;
    }
  }();
  return found;
}

bool forward(
    const Tensor& input,
    const Tensor& weight,
    const Tensor& bias,
    at::IntArrayRef padding,
    const Tensor& out) {
  const Tensor added = bias.defined() ? bias.contiguous() : bias;
  return convolve(
      input, weight, added.defined() ? numbers(added) : nullptr, padding.front(), padding.back(), /*of_input=*/false, out);
}

bool gradient_of_input(const Tensor& grad, const Tensor& weight, at::IntArrayRef padding, const Tensor& of_input) {
  return convolve(grad, weight, nullptr, 2 - padding.front(), 2 - padding.back(), /*of_input=*/true, of_input);
}

bool gradient_of_weight(const Tensor& grad, const Tensor& input, at::IntArrayRef padding, const Tensor& of_weight) {
  const Images from = images_of(input), to = images_of(grad);
  const int64_t rows = to.channels, depth = from.channels, pitch = up_to(depth, kLanes);
  const Tiles tiles(to, padding.front(), padding.back());
  const Parts parts(tiles);
  const int64_t image_step = with_gap(parts.most_tiles() * pitch), grad_step = with_gap(rows * parts.most_tiles());
  // Jobs add four of the points up, over a segment of the parts.
  constexpr int64_t kJobs = kPoints / 4;
  constexpr int64_t kMostSums = 1 << 24; // numbers, of all segments but the first
  const int64_t sum_step = with_gap(rows * pitch), of_segment = kPoints * sum_step;
  const int64_t segments =
      std::min({(at::get_num_threads() + kJobs - 1) / kJobs, parts.count, 1 + kMostSums / of_segment});
  const int64_t jobs = kJobs * segments, of_room = 4 * (image_step + grad_step);
  float* sums = Workspace::of_numbers(segments * of_segment + rooms_for(jobs) * of_room);
  in_rooms(jobs, sums + segments * of_segment, of_room, [&](int64_t job, float* room) {
    const int64_t segment = job / kJobs, r = job % kJobs;
    const Range some = part(parts.count, segments, segment);
    float* sum = sums + segment * of_segment + 4 * r * sum_step;
    for (int64_t i = some.first; i < some.end; ++i) {
      const int64_t columns = parts[i].count() * tiles.in_row;
      const Matrices images{room, image_step, pitch}, grads{room + 4 * image_step, grad_step, columns};
      transform_images_turned(static_cast<int>(r), numbers(input), from, tiles, parts[i], images);
      transform_gradients(static_cast<int>(r), numbers(grad), to, tiles, parts[i], grads);
      for (int64_t s = 0; s < 4; ++s) {
        brgemm(
            rows, depth, columns, grads.pitch, images.pitch, pitch, /*add_C=*/i > some.first,
            grads.first + s * grads.step, images.first + s * images.step, sum + s * sum_step);
      }
    }
  });
  std::atomic<bool> is_finite{true};
  in_threads(rows, [&](Range some) {
    if (!transform_windows(numbers(of_weight), some, depth, {sums, sum_step, pitch}, segments, of_segment)) {
      is_finite = false;
    }
  });
  return is_finite;
}

#else

bool is_available() {
  return false;
}

#define NOT_HERE TORCH_CHECK_NOT_IMPLEMENTED(false, "Winograd's way of convolutions is for processors with AVX-512")
bool forward(const Tensor&, const Tensor&, const Tensor&, at::IntArrayRef, const Tensor&) {
  NOT_HERE;
}
bool gradient_of_input(const Tensor&, const Tensor&, at::IntArrayRef, const Tensor&) {
  NOT_HERE;
}
bool gradient_of_weight(const Tensor&, const Tensor&, at::IntArrayRef, const Tensor&) {
  NOT_HERE;
}

#endif

} // namespace backplane::winograd
