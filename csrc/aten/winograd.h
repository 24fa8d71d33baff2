// Convolutions of 3 × 3 windows that are one place apart, by Winograd's way, F(2 × 2, 3 × 3), on the CPU: 16 products give four
// neighbouring results, for which oneDNN takes 36 (it has had no such kernels for these processors since its third version).
// Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015 (arXiv:1509.09308), have the formulas; gradients are
// the same turned round. Parts of the tiles go from the image to the results in a processor's own cache.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <array>
#include <cstdint>

namespace backplane::winograd {

// Whether this processor has AVX-512, and PyTorch products of blocks, which are oneDNN's, and that is enabled.
bool is_available();

// A convolution, by its operands: images of (count, channels, height, width), and windows.
struct Settings {
  at::IntArrayRef stride, padding, dilation;
  bool transposed;
  int64_t groups;
};

enum class Direction { kForward, kGradientOfInput, kGradientOfWeight };

// Whether it can be computed so: float32, contiguous, in one group.
bool takes(const at::Tensor& input, const at::Tensor& weight, const Settings& settings);

// Sizes of the results of one that can be.
std::array<int64_t, 4> sizes_of_results(const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef padding);

// Whether one that can be is expected to take less time than oneDNN's.
bool pays(Direction direction, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef padding);

// All of it is contiguous, and of the sizes that belong to the others'; a bias may be undefined. False: not all results are finite,
// and they have to be computed in another way, as what is infinite or no number below a tile comes to all of its results.

bool forward(
    const at::Tensor& input,
    const at::Tensor& weight,
    const at::Tensor& bias,
    at::IntArrayRef padding,
    const at::Tensor& out);

bool gradient_of_input(
    const at::Tensor& grad, const at::Tensor& weight, at::IntArrayRef padding, const at::Tensor& of_input);

bool gradient_of_weight(
    const at::Tensor& grad, const at::Tensor& input, at::IntArrayRef padding, const at::Tensor& of_weight);

} // namespace backplane::winograd
