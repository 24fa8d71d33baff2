#include "aten/winograd_transforms.h"

#if defined(__x86_64__)

// GCC's own header makes undefined numbers by reading what has none.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <algorithm>
#include <utility>

namespace backplane::winograd {

#define AVX512 __attribute__((target("avx512f,avx512vl,avx512bw,avx512dq")))
// What loops of a constant number of rounds index is in registers only where they are unrolled.
#define UNROLLED _Pragma("GCC unroll 16")

namespace {

AVX512 inline __mmask16 first_lanes(int64_t count) {
  return count >= kLanes ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}

AVX512 inline bool is_nothing(__m512 numbers) {
  return _mm512_cmp_ps_mask(numbers, _mm512_setzero_ps(), _CMP_EQ_OQ) == 0xffff;
}

// Numbers of a row at even places and at odd ones, from one place on, of which there are 16 each; zeros where the row is not.
class Pairs {
 public:
  AVX512 Pairs(int64_t width, int64_t first)
      : first_(first), low_(lanes_of(width, first)), high_(lanes_of(width, first + kLanes)) {}

  AVX512 void take(const float* row, __m512& even, __m512& odd) const {
    const __m512i evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odds = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    const __m512 a = _mm512_maskz_loadu_ps(low_, row + first_), b = _mm512_maskz_loadu_ps(high_, row + first_ + kLanes);
    even = _mm512_permutex2var_ps(a, evens, b);
    odd = _mm512_permutex2var_ps(a, odds, b);
  }

 private:
  AVX512 static __mmask16 lanes_of(int64_t width, int64_t first) {
    return first_lanes(width - first) & static_cast<__mmask16>(~first_lanes(-first));
  }

  int64_t first_;
  __mmask16 low_, high_;
};

// A row of images below 16 tiles, as their columns have it: zeros for one that is outside of the image.
struct Columns {
  AVX512 Columns(int64_t width, int64_t first) : left(width, first), right(width, first + 2) {}
  AVX512 void take(const float* row, bool is_inside, __m512 (&to)[4]) const {
    if (is_inside) {
      left.take(row, to[0], to[1]);
      right.take(row, to[2], to[3]);
    } else {
      to[0] = to[1] = to[2] = to[3] = _mm512_setzero_ps();
    }
  }
  Pairs left, right;
};

// Bᵀ d of two rows of d, for row r of it, and then times B.
AVX512 inline void combine(int r, const __m512 (&a)[4], const __m512 (&b)[4], __m512 (&to)[4]) {
  __m512 m[4];
  UNROLLED
  for (int s = 0; s < 4; ++s) {
    m[s] = r == 1 ? a[s] + b[s] : a[s] - b[s];
  }
  to[0] = m[0] - m[2];
  to[1] = m[1] + m[2];
  to[2] = m[2] - m[1];
  to[3] = m[1] - m[3];
}
constexpr int kFirst[4] = {0, 1, 2, 1}, kSecond[4] = {2, 2, 1, 3}; // rows that row r is made of

// 16 rows of 16 numbers, `pitch` numbers apart: their columns.
AVX512 inline void load_columns(const float* from, int64_t pitch, __m512 (&rows)[kLanes]) {
  __m512 t[kLanes];
  UNROLLED
  for (int i = 0; i < kLanes; ++i) {
    rows[i] = _mm512_load_ps(from + i * pitch);
  }
  UNROLLED
  for (int i = 0; i < kLanes; i += 2) {
    t[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  UNROLLED
  for (int i = 0; i < kLanes; i += 4) {
    UNROLLED
    for (int j = 0; j < 2; ++j) {
      const __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + 2 + j]);
      rows[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      rows[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  }
  UNROLLED
  for (int i = 0; i < 4; ++i) {
    const __m512 a = rows[i], b = rows[4 + i], c = rows[8 + i], d = rows[12 + i];
    const __m512 ab = _mm512_shuffle_f32x4(a, b, 0x88), ab2 = _mm512_shuffle_f32x4(a, b, 0xdd);
    const __m512 cd = _mm512_shuffle_f32x4(c, d, 0x88), cd2 = _mm512_shuffle_f32x4(c, d, 0xdd);
    t[i] = _mm512_shuffle_f32x4(ab, cd, 0x88);
    t[8 + i] = _mm512_shuffle_f32x4(ab, cd, 0xdd);
    t[4 + i] = _mm512_shuffle_f32x4(ab2, cd2, 0x88);
    t[12 + i] = _mm512_shuffle_f32x4(ab2, cd2, 0xdd);
  }
  UNROLLED
  for (int i = 0; i < kLanes; ++i) {
    rows[i] = t[i];
  }
}

// Windows lie one after the other. Tap t of window w, w < 16, is number 9 w + t: of register and lane.
struct Order {
  __mmask16 of_register[kTaps][kTaps]; // lanes of taps: [tap][register]
  __mmask16 of_tap[kTaps][kTaps]; // lanes of registers: [register][tap]
  alignas(64) int32_t lanes[kTaps][kLanes]; // in registers, of taps
  alignas(64) int32_t windows[kTaps][kLanes]; // of registers
};
const Order& order() {
  static const Order found = [] {
    Order one = {};
    for (int64_t number = 0; number < kTaps * kLanes; ++number) {
      const int64_t window = number / kTaps, tap = number % kTaps, place = number / kLanes, lane = number % kLanes;
      one.of_register[tap][place] |= static_cast<__mmask16>(1u << window);
      one.of_tap[place][tap] |= static_cast<__mmask16>(1u << lane);
      one.lanes[tap][window] = static_cast<int32_t>(lane);
      one.windows[place][lane] = static_cast<int32_t>(window);
    }
    return one;
  }();
  return found;
}

// Some windows, at most 16, by their taps.
AVX512 inline void load_windows(const Order& order, const float* windows, int64_t count, __m512 (&taps)[kTaps]) {
  __m512 registers[kTaps];
  UNROLLED
  for (int i = 0; i < kTaps; ++i) {
    registers[i] = _mm512_maskz_loadu_ps(first_lanes(count * kTaps - i * kLanes), windows + i * kLanes);
  }
  UNROLLED
  for (int tap = 0; tap < kTaps; ++tap) {
    const __m512i lanes = _mm512_load_si512(order.lanes[tap]);
    __m512 found = _mm512_setzero_ps();
    UNROLLED
    for (int i = 0; i < kTaps; ++i) {
      found = _mm512_mask_permutexvar_ps(found, order.of_register[tap][i], lanes, registers[i]);
    }
    taps[tap] = found;
  }
}
AVX512 inline void store_windows(const Order& order, float* windows, int64_t count, const __m512 (&taps)[kTaps]) {
  UNROLLED
  for (int i = 0; i < kTaps; ++i) {
    const __m512i from = _mm512_load_si512(order.windows[i]);
    __m512 found = _mm512_setzero_ps();
    UNROLLED
    for (int tap = 0; tap < kTaps; ++tap) {
      found = _mm512_mask_permutexvar_ps(found, order.of_tap[i][tap], from, taps[tap]);
    }
    _mm512_mask_storeu_ps(windows + i * kLanes, first_lanes(count * kTaps - i * kLanes), found);
  }
}

// G g Gᵀ of 16 windows.
AVX512 inline void transform_window(const __m512 (&taps)[kTaps], __m512 (&to)[kPoints]) {
  const __m512 half = _mm512_set1_ps(.5f);
  __m512 m[4][3];
  UNROLLED
  for (int s = 0; s < 3; ++s) {
    const __m512 sum = taps[s] + taps[6 + s];
    m[0][s] = taps[s];
    m[1][s] = half * (sum + taps[3 + s]);
    m[2][s] = half * (sum - taps[3 + s]);
    m[3][s] = taps[6 + s];
  }
  UNROLLED
  for (int r = 0; r < 4; ++r) {
    const __m512 sum = m[r][0] + m[r][2];
    to[4 * r] = m[r][0];
    to[4 * r + 1] = half * (sum + m[r][1]);
    to[4 * r + 2] = half * (sum - m[r][1]);
    to[4 * r + 3] = m[r][2];
  }
}

} // namespace

AVX512 void transform_images(
    const float* images, const Images& sizes, const Tiles& tiles, Range rows, const Matrices& to) {
  const int64_t width = sizes.width;
  for (int64_t c = 0; c < sizes.channels; ++c) {
    for (int64_t q = rows.first; q < rows.end; ++q) {
      const int64_t y = q % tiles.in_column * 2 - tiles.above;
      const float* first = images + ((q / tiles.in_column * sizes.channels + c) * sizes.height + y) * width;
      float* at = to.first + c * to.pitch + (q - rows.first) * tiles.in_row;
      // What is written behind a row of tiles is written again by the next, or is behind the matrix.
      for (int64_t j = 0; j < tiles.in_row; j += kLanes) {
        const Columns below(width, 2 * j - tiles.left);
        __m512 d[4][4];
        UNROLLED
        for (int r = 0; r < 4; ++r) {
          below.take(first + r * width, y + r >= 0 && y + r < sizes.height, d[r]);
        }
        UNROLLED
        for (int r = 0; r < 4; ++r) {
          __m512 points[4];
          combine(r, d[kFirst[r]], d[kSecond[r]], points);
          UNROLLED
          for (int s = 0; s < 4; ++s) {
            _mm512_storeu_ps(at + (4 * r + s) * to.step + j, points[s]);
          }
        }
      }
    }
  }
}

AVX512 void transform_images_turned(
    int r, const float* images, const Images& sizes, const Tiles& tiles, Range rows, const Matrices& to) {
  const int64_t width = sizes.width, of_channel = sizes.height * width;
  const int64_t at_once = std::max<int64_t>(1, kLanes / tiles.in_row); // rows of tiles
  alignas(64) float points[4][kLanes][2 * kLanes];
  for (int64_t c0 = 0; c0 < sizes.channels; c0 += kLanes) {
    const int64_t channels = std::min(kLanes, sizes.channels - c0);
    for (int64_t q0 = rows.first; q0 < rows.end; q0 += at_once) {
      const int64_t q1 = std::min(q0 + at_once, rows.end);
      for (int64_t j = 0; j < tiles.in_row; j += kLanes) {
        const Columns below(width, 2 * j - tiles.left);
        for (int64_t q = q0; q < q1; ++q) {
          const int64_t y = q % tiles.in_column * 2 - tiles.above, y1 = y + kFirst[r], y2 = y + kSecond[r];
          const float* first = images + (q / tiles.in_column * sizes.channels + c0) * of_channel;
          for (int64_t c = 0; c < channels; ++c) {
            __m512 a[4], b[4], of_tiles[4];
            below.take(first + c * of_channel + y1 * width, y1 >= 0 && y1 < sizes.height, a);
            below.take(first + c * of_channel + y2 * width, y2 >= 0 && y2 < sizes.height, b);
            combine(r, a, b, of_tiles);
            UNROLLED
            for (int s = 0; s < 4; ++s) {
              _mm512_storeu_ps(points[s][c] + (q - q0) * tiles.in_row, of_tiles[s]);
            }
          }
        }
        float* at = to.first + ((q0 - rows.first) * tiles.in_row + j) * to.pitch + c0;
        const int64_t count = std::min(kLanes, (q1 - q0) * tiles.in_row - j);
        UNROLLED
        for (int s = 0; s < 4; ++s) {
          __m512 lines[kLanes];
          load_columns(points[s][0], 2 * kLanes, lines);
          UNROLLED
          for (int t = 0; t < kLanes; ++t) {
            if (t < count) {
              _mm512_storeu_ps(at + s * to.step + t * to.pitch, lines[t]);
            }
          }
        }
      }
    }
  }
}

AVX512 void transform_gradients(
    int r, const float* grads, const Images& sizes, const Tiles& tiles, Range rows, const Matrices& to) {
  const int64_t width = sizes.width;
  const __m512 zero = _mm512_setzero_ps();
  for (int64_t c = 0; c < sizes.channels; ++c) {
    for (int64_t q = rows.first; q < rows.end; ++q) {
      const int64_t y = q % tiles.in_column * 2;
      const float* first = grads + ((q / tiles.in_column * sizes.channels + c) * sizes.height + y) * width;
      float* at = to.first + c * to.pitch + (q - rows.first) * tiles.in_row;
      for (int64_t j = 0; j < tiles.in_row; j += kLanes) {
        const Pairs pairs(width, 2 * j);
        __m512 a[2] = {zero, zero}, b[2] = {zero, zero};
        if (r < 3) {
          pairs.take(first, a[0], a[1]);
        }
        if (r > 0 && y + 1 < sizes.height) {
          pairs.take(first + width, b[0], b[1]);
        }
        const __m512 even = r == 1 ? a[0] + b[0] : a[0] - b[0], odd = r == 1 ? a[1] + b[1] : a[1] - b[1];
        _mm512_storeu_ps(at + j, even);
        _mm512_storeu_ps(at + to.step + j, even + odd);
        _mm512_storeu_ps(at + 2 * to.step + j, even - odd);
        _mm512_storeu_ps(at + 3 * to.step + j, zero - odd);
      }
    }
  }
}

AVX512 bool transform_results(
    float* results, const Images& sizes, const Tiles& tiles, Range rows, const Matrices& from, const float* bias) {
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  __m512 nothing = _mm512_setzero_ps(); // stays so while all is finite
  for (int64_t c = 0; c < sizes.channels; ++c) {
    const __m512 added = _mm512_set1_ps(bias == nullptr ? 0.f : bias[c]);
    for (int64_t q = rows.first; q < rows.end; ++q) {
      const int64_t y = q % tiles.in_column * 2;
      float* row = results + ((q / tiles.in_column * sizes.channels + c) * sizes.height + y) * sizes.width;
      const float* at = from.first + c * from.pitch + (q - rows.first) * tiles.in_row;
      for (int64_t j = 0; j < tiles.in_row; j += kLanes) {
        __m512 m[2][4];
        UNROLLED
        for (int s = 0; s < 4; ++s) {
          const float* line = at + s * from.step + j;
          const __m512 a = _mm512_loadu_ps(line), b = _mm512_loadu_ps(line + 4 * from.step);
          const __m512 d = _mm512_loadu_ps(line + 8 * from.step), e = _mm512_loadu_ps(line + 12 * from.step);
          m[0][s] = a + b + d;
          m[1][s] = b - d - e;
        }
        const int64_t left = sizes.width - 2 * j;
        UNROLLED
        for (int r = 0; r < 2; ++r) {
          if (y + r == sizes.height) {
            break;
          }
          const __m512 even = m[r][0] + m[r][1] + m[r][2] + added, odd = m[r][1] - m[r][2] - m[r][3] + added;
          const __mmask16 tiles_here = first_lanes(tiles.in_row - j);
          nothing += _mm512_maskz_sub_ps(tiles_here, even, even) + _mm512_maskz_sub_ps(tiles_here, odd, odd);
          float* place = row + r * sizes.width + 2 * j;
          _mm512_mask_storeu_ps(place, first_lanes(left), _mm512_permutex2var_ps(even, low, odd));
          _mm512_mask_storeu_ps(place + kLanes, first_lanes(left - kLanes), _mm512_permutex2var_ps(even, high, odd));
        }
      }
    }
  }
  return is_nothing(nothing);
}

AVX512 void transform_weight(const float* weight, Range results, int64_t channels, const Matrices& to) {
  const Order& places = order();
  for (int64_t row = results.first; row < results.end; ++row) {
    for (int64_t c = 0; c < channels; c += kLanes) {
      const int64_t count = std::min(kLanes, channels - c);
      __m512 taps[kTaps], points[kPoints];
      load_windows(places, weight + (row * channels + c) * kTaps, count, taps);
      transform_window(taps, points);
      UNROLLED
      for (int i = 0; i < kPoints; ++i) {
        _mm512_mask_storeu_ps(to.first + i * to.step + row * to.pitch + c, first_lanes(count), points[i]);
      }
    }
  }
}

AVX512 void transform_weight_turned(
    const float* weight, int64_t results, Range some, int64_t channels, const Matrices& to) {
  const Order& places = order();
  alignas(64) float turned[kPoints][kLanes][kLanes];
  for (int64_t k0 = 0; k0 < results; k0 += kLanes) {
    const int64_t rows = std::min(kLanes, results - k0);
    for (int64_t c = some.first; c < some.end; c += kLanes) {
      const int64_t count = std::min(kLanes, some.end - c);
      for (int64_t k = 0; k < rows; ++k) {
        __m512 taps[kTaps], points[kPoints];
        load_windows(places, weight + ((k0 + k) * channels + c) * kTaps, count, taps);
        UNROLLED
        for (int tap = 0; tap < kTaps / 2; ++tap) {
          std::swap(taps[tap], taps[kTaps - 1 - tap]);
        }
        transform_window(taps, points);
        UNROLLED
        for (int i = 0; i < kPoints; ++i) {
          _mm512_store_ps(turned[i][k], points[i]);
        }
      }
      UNROLLED
      for (int i = 0; i < kPoints; ++i) {
        __m512 lines[kLanes];
        load_columns(turned[i][0], kLanes, lines);
        UNROLLED
        for (int j = 0; j < kLanes; ++j) {
          if (j < count) {
            float* place = to.first + i * to.step + (c + j) * to.pitch + k0;
            _mm512_mask_storeu_ps(place, first_lanes(rows), lines[j]);
          }
        }
      }
    }
  }
}

AVX512 bool transform_windows(
    float* weight, Range results, int64_t channels, const Matrices& from, int64_t sums, int64_t distance) {
  const Order& places = order();
  const __m512 half = _mm512_set1_ps(.5f);
  __m512 nothing = _mm512_setzero_ps();
  for (int64_t row = results.first; row < results.end; ++row) {
    for (int64_t c = 0; c < channels; c += kLanes) {
      __m512 points[kPoints];
      UNROLLED
      for (int i = 0; i < kPoints; ++i) {
        const float* at = from.first + i * from.step + row * from.pitch + c;
        points[i] = _mm512_loadu_ps(at);
        for (int64_t sum = 1; sum < sums; ++sum) {
          points[i] += _mm512_loadu_ps(at + sum * distance);
        }
      }
      __m512 m[3][4], taps[kTaps];
      UNROLLED
      for (int s = 0; s < 4; ++s) {
        m[0][s] = points[s] + half * (points[4 + s] + points[8 + s]);
        m[1][s] = half * (points[4 + s] - points[8 + s]);
        m[2][s] = half * (points[4 + s] + points[8 + s]) + points[12 + s];
      }
      UNROLLED
      for (int r = 0; r < 3; ++r) {
        const __m512 sum = half * (m[r][1] + m[r][2]);
        taps[3 * r] = m[r][0] + sum;
        taps[3 * r + 1] = half * (m[r][1] - m[r][2]);
        taps[3 * r + 2] = sum + m[r][3];
      }
      const int64_t count = std::min(kLanes, channels - c);
      UNROLLED
      for (int tap = 0; tap < kTaps; ++tap) {
        nothing += _mm512_maskz_sub_ps(first_lanes(count), taps[tap], taps[tap]);
      }
      store_windows(places, weight + (row * channels + c) * kTaps, count, taps);
    }
  }
  return is_nothing(nothing);
}

} // namespace backplane::winograd

#endif
