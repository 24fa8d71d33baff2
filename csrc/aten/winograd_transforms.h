// What Winograd's way (aten/winograd.h) makes of images, windows and products on the way, with AVX-512; the formulas are those of
// kernels/templates/winograd.py. A window, and what is below a tile of 2 × 2 results, comes to 16 numbers, each of which is in a
// matrix of its own: number 4 r + s is row r and column s of them.
#pragma once

#include <cstdint>

namespace backplane::winograd {

constexpr int64_t kPoints = 16, kTaps = 9;
constexpr int64_t kLanes = 16; // numbers of a register

constexpr int64_t up_to(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}

struct Range {
  int64_t first, end;
  int64_t count() const {
    return end - first;
  }
};

// Contiguous.
struct Images {
  int64_t count, channels, height, width;
};

// Those that cover results: rows of them, of all images.
struct Tiles {
  Tiles(const Images& of_results, int64_t padding_above, int64_t padding_left)
      : above(padding_above),
        left(padding_left),
        in_column((of_results.height + 1) / 2),
        in_row((of_results.width + 1) / 2),
        rows(of_results.count * in_column) {}
  int64_t above, left; // zeros beside images
  int64_t in_column, in_row; // of an image
  int64_t rows;
};

// Matrices, one per point, `step` numbers apart, with rows of `pitch` numbers; 16 more numbers behind each may be written.
struct Matrices {
  float* first;
  int64_t step, pitch;
};

// (channels, tiles) of some rows of tiles: Bᵀ d B.
void transform_images(const float* images, const Images& sizes, const Tiles& tiles, Range rows, const Matrices& to);

// The same turned, (tiles, channels): points 4 r to 4 r + 3, of which `to` begins with the first.
void transform_images_turned(
    int r, const float* images, const Images& sizes, const Tiles& tiles, Range rows, const Matrices& to);

// (channels, tiles) of gradients of results, A g Aᵀ: points as before.
void transform_gradients(int r, const float* grads, const Images& sizes, const Tiles& tiles, Range rows, const Matrices& to);

// Results from (channels, tiles), Aᵀ m A, with a bias unless it is null. Whether all of them are finite.
bool transform_results(
    float* results, const Images& sizes, const Tiles& tiles, Range rows, const Matrices& from, const float* bias);

// (results, channels) of windows, G g Gᵀ, for some of the results.
void transform_weight(const float* weight, Range results, int64_t channels, const Matrices& to);

// (channels, results) of windows that are turned round, for some of the channels.
void transform_weight_turned(
    const float* weight, int64_t results, Range some, int64_t channels, const Matrices& to);

// Windows from (results, channels), Gᵀ m G, for some of the results: of the sum of such matrices, `distance` numbers apart.
// Whether all of them are finite.
bool transform_windows(
    float* weight, Range results, int64_t channels, const Matrices& from, int64_t sums, int64_t distance);

} // namespace backplane::winograd
