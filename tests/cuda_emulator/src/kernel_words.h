// CUDA C++ that the prelude of the kernel interpreter lacks. Threads of a block take turns, so that a plain read and
// write is atomic; blocks run one after another.

extern "C" {
void emulator_trap() __attribute__((noreturn));
void emulator_assert(const char* text, const char* file, int line, const char* function) __attribute__((noreturn));
int printf(const char* format, ...);
}

#undef __device__
#define __device__ __attribute__((unused))
#undef __launch_bounds__
#define __launch_bounds__(...)
#define __host__
#define __constant__ __attribute__((aligned(16)))
#define __managed__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __grid_constant__
#define __CUDACC__ 1
#define __CUDACC_RTC__ 1
#define warpSize 32
#define __threadfence() ((void)0)
#define __threadfence_block() ((void)0)
#define __threadfence_system() ((void)0)
#define ANY_MAY_STAY(store) \
  interpreter_unordered(1); \
  store;                    \
  interpreter_unordered(0)
#define __trap() emulator_trap()
#define assert(condition) ((condition) ? (void)0 : emulator_assert(#condition, __FILE__, __LINE__, __PRETTY_FUNCTION__))
#define __ldg(at) (*(at))
#define __ldcg(at) (*(at))
#define __ldcs(at) (*(at))
#define __stcs(at, value) (*(at) = (value))
#define clock64() ((long long)__builtin_ia32_rdtsc())
#define clock() ((int)__builtin_ia32_rdtsc())
#define __popc(x) __builtin_popcount(x)
#define __popcll(x) __builtin_popcountll(x)
#define __clz(x) ((x) == 0 ? 32 : __builtin_clz(x))
#define __ffs(x) __builtin_ffs(x)
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __fdividef(x, y) ((x) / (y))
#define __umul64hi(a, b) ((unsigned long long)(((unsigned __int128)(a) * (b)) >> 64))

struct dim3 {
  unsigned x, y, z;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
#define make_uint2(x, y) (uint2{x, y})
#define make_int2(x, y) (int2{x, y})
#define make_uint4(x, y, z, w) (uint4{x, y, z, w})
#define make_int4(x, y, z, w) (int4{x, y, z, w})
#define make_float4(x, y, z, w) (float4{x, y, z, w})

// --- shuffles and votes of a warp ------------------------------------------------------------------------------------

static inline void __syncwarp(const unsigned mask = 0xffffffffu) {
  interpreter_shuffle_barrier(mask);
}
static inline unsigned emulator_lane() {
  return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
}
template <class T>
static inline T emulator_shuffle(const unsigned mask, const T value, const unsigned lane) {
  union {
    unsigned long bits;
    T value;
  } given = {0}, got;
  static_assert(sizeof(T) <= 8, "a shuffle exchanges up to 8 bytes");
  given.value = value;
  got.bits = interpreter_shuffle_from(given.bits, lane, mask);
  return got.value;
}
#undef __shfl_down_sync
template <class T>
static inline T __shfl_sync(const unsigned mask, const T value, const int from, const unsigned width = 32) {
  return emulator_shuffle(mask, value, (emulator_lane() & ~(width - 1)) + ((unsigned)from & (width - 1)));
}
template <class T>
static inline T __shfl_down_sync(const unsigned mask, const T value, const unsigned by, const unsigned width = 32) {
  const unsigned lane = emulator_lane(), to = lane + by;
  return emulator_shuffle(mask, value, (lane & (width - 1)) + by < width ? to : lane);
}
// HIP's: without a mask.
template <class T>
static inline T __shfl_down(const T value, const unsigned by) {
  return __shfl_down_sync(0xffffffffu, value, by);
}
template <class T>
static inline T __shfl_up_sync(const unsigned mask, const T value, const unsigned by, const unsigned width = 32) {
  const unsigned lane = emulator_lane();
  return emulator_shuffle(mask, value, (lane & (width - 1)) >= by ? lane - by : lane);
}
template <class T>
static inline T __shfl_xor_sync(const unsigned mask, const T value, const int by, const unsigned width = 32) {
  const unsigned lane = emulator_lane(), from = lane ^ (unsigned)by;
  return emulator_shuffle(mask, value, from < (lane & ~(width - 1)) + width ? from : lane);
}
static inline unsigned __activemask() {
  return 0xffffffffu;
}
static inline unsigned __ballot_sync(const unsigned mask, const int predicate) {
  unsigned bits = 0;
  const unsigned self = emulator_lane();
  for (unsigned lane = 0; lane < 32; ++lane) {
    const unsigned bit = emulator_shuffle<unsigned>(mask, predicate != 0 ? 1u << self : 0, lane);
    bits |= bit & 1u << lane; // a missing thread leaves the own bit, which is another one
  }
  return bits & mask;
}
static inline int __any_sync(const unsigned mask, const int predicate) {
  return __ballot_sync(mask, predicate) != 0;
}
static inline int __all_sync(const unsigned mask, const int predicate) {
  return __ballot_sync(mask, !predicate) == 0;
}

// --- atomics ---------------------------------------------------------------------------------------------------------

// The accesses are reported as atomic, and not instrumented.
#define EMULATOR_ATOMIC(name, result)                                                       \
  template <class T, class U>                                                               \
  static inline __attribute__((no_sanitize("thread"))) T name(T* const at, const U of) {    \
    interpreter_range((ulong)at, sizeof(T), 2);                                             \
    const T value = (T)of, old = *at;                                                       \
    *at = (result);                                                                         \
    return old;                                                                             \
  }
EMULATOR_ATOMIC(atomicAdd, old + value)
EMULATOR_ATOMIC(atomicSub, old - value)
EMULATOR_ATOMIC(atomicExch, value)
EMULATOR_ATOMIC(atomicMin, value < old ? value : old)
EMULATOR_ATOMIC(atomicMax, value > old ? value : old)
EMULATOR_ATOMIC(atomicAnd, old& value)
EMULATOR_ATOMIC(atomicOr, old | value)
EMULATOR_ATOMIC(atomicXor, old ^ value)
EMULATOR_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
EMULATOR_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
#undef atomicCAS
template <class T, class U, class V>
static inline __attribute__((no_sanitize("thread"))) T atomicCAS(T* const at, const U expected, const V desired) {
  interpreter_range((ulong)at, sizeof(T), 2);
  const T old = *at;
  if (old == (T)expected) {
    *at = (T)desired;
  }
  return old;
}
