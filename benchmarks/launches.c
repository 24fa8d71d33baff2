/* Records a program's OpenCL launches and repeats them in a bare loop. launches.py compiles and uses it. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LONGEST 64 /* maximum bytes of an argument that can be recorded */

typedef int32_t (*set_kernel_arg)(void *kernel, uint32_t index, size_t bytes, const void *value);
typedef int32_t (*enqueue_kernel)(
    void *queue, void *kernel, uint32_t dimensions, const size_t *offset, const size_t *items, const size_t *group,
    uint32_t waits, void *const *wait_list, void **event);

static set_kernel_arg set_arg;
static enqueue_kernel enqueue;

/* --- recording */

struct call { /* of clEnqueueNDRangeKernel, or of clSetKernelArg if `queue` is null */
  void *kernel;
  void *queue;
  uint32_t number; /* number of dimensions, or index of the argument */
  uint32_t bytes;
  size_t items[3], group[3];
  unsigned char value[LONGEST];
};

static volatile int watching;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct call *calls;
static size_t count, room;
static int lost; /* whether a call could not be recorded */

static void take_down(const struct call *one) {
  pthread_mutex_lock(&lock);
  if (count == room) {
    const size_t more = room ? 2 * room : 4096;
    struct call *const moved = realloc(calls, more * sizeof *calls);
    if (moved != NULL) {
      calls = moved;
      room = more;
    }
  }
  if (count < room) {
    calls[count++] = *one;
  } else {
    lost = 1;
  }
  pthread_mutex_unlock(&lock);
}

/* Replacements for OpenCL's functions. */
int32_t watched_set_kernel_arg(void *kernel, uint32_t index, size_t bytes, const void *value) {
  if (watching) {
    struct call one = {.kernel = kernel, .number = index, .bytes = (uint32_t)bytes};
    if (value == NULL || bytes > LONGEST) {
      lost = 1;
    } else {
      memcpy(one.value, value, bytes);
      take_down(&one);
    }
  }
  return set_arg(kernel, index, bytes, value);
}

int32_t watched_enqueue_kernel(
    void *queue, void *kernel, uint32_t dimensions, const size_t *offset, const size_t *items, const size_t *group,
    uint32_t waits, void *const *wait_list, void **event) {
  if (watching) {
    struct call one = {.kernel = kernel, .queue = queue, .number = dimensions};
    memcpy(one.items, items, dimensions * sizeof *items);
    memcpy(one.group, group, dimensions * sizeof *group);
    lost |= offset != NULL || waits != 0;
    take_down(&one);
  }
  return enqueue(queue, kernel, dimensions, offset, items, group, waits, wait_list, event);
}

void forward_to(set_kernel_arg set, enqueue_kernel launch) {
  set_arg = set;
  enqueue = launch;
}

void watch(int whether) {
  watching = whether;
}

const struct call *recorded_calls(size_t *how_many, int *not_all) {
  *how_many = count;
  *not_all = lost;
  return calls;
}

/* --- the loop */

struct argument {
  uint32_t index, bytes;
  const void *value;
};

struct launch {
  void *queue, *kernel;
  const struct argument *arguments; /* to set before the launch */
  uint32_t set, dimensions;
  size_t items[3], group[3];
};

/* Launches all. Stops at the first error and returns OpenCL's status. */
int32_t give(const struct launch *launches, size_t how_many) {
  for (const struct launch *one = launches; one != launches + how_many; ++one) {
    for (const struct argument *argument = one->arguments; argument != one->arguments + one->set; ++argument) {
      const int32_t status = set_arg(one->kernel, argument->index, argument->bytes, argument->value);
      if (status != 0) {
        return status;
      }
    }
    const int32_t status =
        enqueue(one->queue, one->kernel, one->dimensions, NULL, one->items, one->group, 0, NULL, NULL);
    if (status != 0) {
      return status;
    }
  }
  return 0;
}
