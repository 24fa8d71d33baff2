// The end of a compiled source: its kernels, with the sizes of their parameters. Before this file, the compiler's input
// has EMULATOR_BUILD (the emulator's name of its version), EMULATOR_ARCHITECTURE, and EMULATOR_KERNELS(of), which lists
// kernels with their __launch_bounds__ and the names of their parameters.

#line 1 "kernel_table.h"
#undef min
#undef max

struct emulator_argument {
  unsigned long memory, offset;
  void* data;
  unsigned long bytes;
};
struct emulator_kernel { // modules.cpp has the same structure
  void* function;
  void (*run)(const emulator_argument*);
  unsigned long count;
  const unsigned long *bytes, *alignments, *elements;
  long threads;
  const char *parameters, *expression;
};

// The size of what a parameter points to; 0 if it is no pointer.
template <class T>
struct emulator_element {
  static constexpr unsigned long bytes = 0;
};
template <class T>
struct emulator_element<T*> {
  static constexpr unsigned long bytes = sizeof(T);
};
template <>
struct emulator_element<void*> {
  static constexpr unsigned long bytes = 1;
};
template <>
struct emulator_element<const void*> {
  static constexpr unsigned long bytes = 1;
};

#define EMULATOR_PLAIN __attribute__((no_sanitize("thread")))
template <class... P>
struct emulator_apply {
  // Arguments in braces are evaluated in order.
  EMULATOR_PLAIN emulator_apply(void (*function)(P...), P... given) {
    function(given...);
  }
};
template <class F, F function>
struct emulator_entry;
template <class... P, void (*function)(P...)>
struct emulator_entry<void (*)(P...), function> {
  static EMULATOR_PLAIN void run(const emulator_argument* given) {
    unsigned long next = 0;
    emulator_apply<P...>{function, *(P*)given[next++].data...};
  }
  static constexpr unsigned long count = sizeof...(P);
  static constexpr unsigned long bytes[] = {sizeof(P)..., 0}, alignments[] = {alignof(P)..., 0};
  static constexpr unsigned long elements[] = {emulator_element<P>::bytes..., 0};
};

static constexpr long emulator_bounds() {
  return 1024;
}
template <class... T>
static constexpr long emulator_bounds(const long threads, T...) {
  return threads;
}

#define EMULATOR_KERNEL(bounds, parameters, ...)                     \
  {(void*)&__VA_ARGS__,                                              \
   emulator_entry<decltype(&__VA_ARGS__), &__VA_ARGS__>::run,        \
   emulator_entry<decltype(&__VA_ARGS__), &__VA_ARGS__>::count,      \
   emulator_entry<decltype(&__VA_ARGS__), &__VA_ARGS__>::bytes,      \
   emulator_entry<decltype(&__VA_ARGS__), &__VA_ARGS__>::alignments, \
   emulator_entry<decltype(&__VA_ARGS__), &__VA_ARGS__>::elements,   \
   emulator_bounds bounds,                                           \
   parameters,                                                       \
   #__VA_ARGS__},

extern "C" {
extern char __ehdr_start[] __attribute__((visibility("hidden"))), _end[] __attribute__((visibility("hidden")));
__attribute__((visibility("default"))) char emulator_dynamic_shared[227 << 10]
    __attribute__((aligned(1024), section(".emulator_dynamic_shared,\"aw\",@nobits#")));
extern const emulator_kernel emulator_kernels[] = {EMULATOR_KERNELS(EMULATOR_KERNEL){0, 0, 0, 0, 0, 0, 0, 0, 0}};
extern const int emulator_architecture = EMULATOR_ARCHITECTURE;
extern const char emulator_build[] = EMULATOR_BUILD;
extern char* const emulator_image[] = {__ehdr_start, _end};
}
