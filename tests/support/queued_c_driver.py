"""A driver for tests: an accelerator with a native launcher in C. Each queue is a C thread that runs its work in order.
Kernels are those of examples/drivers/plain_c.

`library()` exports `called` (number of calls of each function of NAMES), `answers` (status that each function returns;
0: it does its work) and `with_gil` (number of calls made by a thread that held the GIL).

Environment variables:
- QUEUED_C_HANDS_OVER: groups of functions (COPIES, EVENTS, …) that the launcher has besides the four required ones
- QUEUED_C_WITHOUT: a function that is missing from the launcher
- QUEUED_C_DEVICES: the number of devices
- QUEUED_C_HOST_ACCESSIBLE=1: device memory is accessible to the host
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import numpy
from driver_plain_c_module import PlainC, PlainCDevice, address, built

from torch_backplane.drivers import DeviceProperties, Driver, NativeLauncher
from torch_backplane.kernels import Target

COPIES = ("copy_in", "copy_out")
EVENTS = (
    "create_event",
    "destroy_event",
    "record_event",
    "wait_event",
    "query_event",
    "synchronize_event",
    "elapsed",
)
HOST_CALLBACKS = ("host_callback",)
PEER_COPIES = ("copy_from_peer",)
CROSS_DEVICE_WAITS = ("wait_peer_event",)
INTERPROCESS = (
    "export_memory",
    "import_memory",
    "close_memory",
    "create_shared_event",
    "export_event",
    "import_event",
)
GRAPHS = ("graph_create", "graph_update", "graph_launch", "graph_destroy")
CAPTURES = ("begin_capture", "end_capture", "destroy_captured")
OPTIONAL = (*COPIES, *EVENTS, *HOST_CALLBACKS, *PEER_COPIES, *CROSS_DEVICE_WAITS, *INTERPROCESS, *GRAPHS, *CAPTURES)
NAMES = ("launch", "copy", "fill", "flush", *OPTIONAL, "axpy")

LAUNCHER = """\
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
typedef struct { char* memory; uint64_t offset; const void* data; uint64_t bytes; } argument_t;
typedef void kernel_t(const uint64_t* items, const uint64_t* group, void** arguments);
typedef void work_t(void* data);
typedef struct command { struct command* next; work_t* work; char data[]; } command_t;
typedef struct {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  command_t *first, *last;
  uint64_t given, done;
  uint64_t users; /* of a captured one, which has no thread */
} queue_t;
typedef struct {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  uint64_t recorded, reached;
  double time;
  char name[64]; /* of a shared event */
} event_t;

enum {
  LAUNCH, COPY, FILL, FLUSH, COPY_IN, COPY_OUT, CREATE, DESTROY, RECORD, WAIT, QUERY, SYNCHRONIZE, ELAPSED,
  HOST_CALLBACK, COPY_FROM_PEER, WAIT_PEER, EXPORT_MEMORY, IMPORT_MEMORY, CLOSE_MEMORY, CREATE_SHARED, EXPORT_EVENT,
  IMPORT_EVENT, GRAPH_CREATE, GRAPH_UPDATE, GRAPH_LAUNCH, GRAPH_DESTROY,
  BEGIN_CAPTURE, END_CAPTURE, DESTROY_CAPTURED, AXPY
};
uint64_t called[AXPY + 1];
int answers[AXPY + 1];
uint64_t with_gil;
int (*has_gil)(void);
#define ENTER(which) \\
  __sync_fetch_and_add(&called[which], 1); \\
  if (has_gil && has_gil()) __sync_fetch_and_add(&with_gil, 1); \\
  if (answers[which]) return answers[which]

static void* serve(void* given) {
  queue_t* queue = given;
  pthread_mutex_lock(&queue->lock);
  for (;;) {
    while (!queue->first) pthread_cond_wait(&queue->changed, &queue->lock);
    command_t* command = queue->first;
    pthread_mutex_unlock(&queue->lock);
    command->work(command->data);
    pthread_mutex_lock(&queue->lock);
    queue->first = command->next;
    if (!queue->first) queue->last = 0;
    free(command);
    ++queue->done;
    pthread_cond_broadcast(&queue->changed);
  }
}
static queue_t* make_queue(void) {
  queue_t* queue = calloc(1, sizeof *queue);
  pthread_mutex_init(&queue->lock, 0);
  pthread_cond_init(&queue->changed, 0);
  return queue;
}
queue_t* create_queue(void) {
  queue_t* queue = make_queue();
  pthread_t thread;
  pthread_create(&thread, 0, serve, queue);
  pthread_detach(thread);
  return queue;
}
void enqueue(queue_t* queue, work_t* work, const void* data, uint64_t bytes) {
  command_t* command = malloc(sizeof *command + bytes);
  command->next = 0;
  command->work = work;
  memcpy(command->data, data, bytes);
  pthread_mutex_lock(&queue->lock);
  if (queue->last) queue->last->next = command; else queue->first = command;
  queue->last = command;
  ++queue->given;
  pthread_cond_broadcast(&queue->changed);
  pthread_mutex_unlock(&queue->lock);
}
int is_done(queue_t* queue) {
  pthread_mutex_lock(&queue->lock);
  const int done = queue->done == queue->given;
  pthread_mutex_unlock(&queue->lock);
  return done;
}
void finish(queue_t* queue) {
  pthread_mutex_lock(&queue->lock);
  for (const uint64_t last = queue->given; queue->done < last;) pthread_cond_wait(&queue->changed, &queue->lock);
  pthread_mutex_unlock(&queue->lock);
}

#define MOST 64
typedef struct {
  kernel_t* kernel;
  uint64_t items[3], group[3], count;
  struct { char* place; uint64_t number[2]; int is_number; } arguments[MOST];
} launch_t;
static void do_launch(void* data) {
  launch_t* given = data;
  void* arguments[MOST];
  for (uint64_t i = 0; i < given->count; ++i)
    arguments[i] = given->arguments[i].is_number ? (void*)given->arguments[i].number
                                                 : (void*)&given->arguments[i].place;
  given->kernel(given->items, given->group, arguments);
}
static int make_launch(launch_t* launch, kernel_t* kernel, const uint64_t* items, const uint64_t* group,
                       const argument_t* given, uint64_t count) {
  if (count > MOST) return -1;
  launch_t made = {kernel, {items[0], items[1], items[2]}, {group[0], group[1], group[2]}, count};
  for (uint64_t i = 0; i < count; ++i) {
    made.arguments[i].place = given[i].memory ? given[i].memory + given[i].offset : 0;
    made.arguments[i].is_number = given[i].bytes > 0;
    memcpy(made.arguments[i].number, given[i].data, given[i].bytes);
  }
  *launch = made;
  return 0;
}
int launch(queue_t* queue, kernel_t* kernel, const uint64_t* items, const uint64_t* group, const argument_t* given,
           uint64_t count) {
  ENTER(LAUNCH);
  launch_t made;
  if (make_launch(&made, kernel, items, group, given, count)) return -1;
  enqueue(queue, do_launch, &made, sizeof made);
  return 0;
}

typedef struct { char* to; const char* from; uint64_t bytes; int value; } copy_t;
static void do_copy(void* data) { const copy_t* given = data; memmove(given->to, given->from, given->bytes); }
static void do_fill(void* data) { const copy_t* given = data; memset(given->to, given->value, given->bytes); }
int copy(queue_t* queue, char* to, uint64_t to_offset, char* from, uint64_t from_offset, uint64_t bytes) {
  ENTER(COPY);
  enqueue(queue, do_copy, &(copy_t){to + to_offset, from + from_offset, bytes}, sizeof(copy_t));
  return 0;
}
int fill(queue_t* queue, char* memory, uint64_t offset, uint64_t bytes, int value) {
  ENTER(FILL);
  enqueue(queue, do_fill, &(copy_t){memory + offset, 0, bytes, value}, sizeof(copy_t));
  return 0;
}
int flush(queue_t* queue) { ENTER(FLUSH); return 0; }
int copy_in(queue_t* queue, char* to, uint64_t to_offset, const void* from, uint64_t bytes) {
  ENTER(COPY_IN);
  enqueue(queue, do_copy, &(copy_t){to + to_offset, from, bytes}, sizeof(copy_t));
  return 0;
}
int copy_out(queue_t* queue, void* to, char* from, uint64_t from_offset, uint64_t bytes) {
  ENTER(COPY_OUT);
  enqueue(queue, do_copy, &(copy_t){to, from + from_offset, bytes}, sizeof(copy_t));
  return 0;
}

typedef struct { event_t* event; uint64_t which; } recording_t;
static void reach(void* data) {
  const recording_t* given = data;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  pthread_mutex_lock(&given->event->lock);
  if (given->event->reached < given->which) given->event->reached = given->which;
  given->event->time = now.tv_sec * 1e3 + now.tv_nsec / 1e6;
  pthread_cond_broadcast(&given->event->changed);
  pthread_mutex_unlock(&given->event->lock);
}
static void await(void* data) {
  const recording_t* given = data;
  pthread_mutex_lock(&given->event->lock);
  while (given->event->reached < given->which) pthread_cond_wait(&given->event->changed, &given->event->lock);
  pthread_mutex_unlock(&given->event->lock);
}
static uint64_t latest(event_t* event) {
  pthread_mutex_lock(&event->lock);
  const uint64_t which = event->recorded;
  pthread_mutex_unlock(&event->lock);
  return which;
}
int create_event(int timing, event_t** event) {
  ENTER(CREATE);
  *event = calloc(1, sizeof **event);
  pthread_mutex_init(&(*event)->lock, 0);
  pthread_cond_init(&(*event)->changed, 0);
  return 0;
}
int destroy_event(event_t* event) { ENTER(DESTROY); return 0; } // pending commands may use it, so it is not freed
int record_event(event_t* event, queue_t* queue) {
  ENTER(RECORD);
  pthread_mutex_lock(&event->lock);
  const uint64_t which = ++event->recorded;
  pthread_mutex_unlock(&event->lock);
  enqueue(queue, reach, &(recording_t){event, which}, sizeof(recording_t));
  return 0;
}
int wait_event(event_t* event, queue_t* queue) {
  ENTER(WAIT);
  enqueue(queue, await, &(recording_t){event, latest(event)}, sizeof(recording_t));
  return 0;
}
int query_event(event_t* event, int* is_reached) {
  ENTER(QUERY);
  pthread_mutex_lock(&event->lock);
  *is_reached = event->reached == event->recorded;
  pthread_mutex_unlock(&event->lock);
  return 0;
}
int synchronize_event(event_t* event) {
  ENTER(SYNCHRONIZE);
  await(&(recording_t){event, latest(event)});
  return 0;
}
int elapsed(event_t* start, event_t* end, double* milliseconds) {
  ENTER(ELAPSED);
  *milliseconds = end->time - start->time;
  return 0;
}

typedef struct { void (*function)(void*); void* argument; } host_callback_t;
static void do_call(void* data) { const host_callback_t* given = data; given->function(given->argument); }
int host_callback(queue_t* queue, void (*function)(void*), void* argument) {
  ENTER(HOST_CALLBACK);
  enqueue(queue, do_call, &(host_callback_t){function, argument}, sizeof(host_callback_t));
  return 0;
}
int copy_from_peer(queue_t* queue, char* to, uint64_t to_offset, char* from, uint64_t from_offset, uint64_t bytes) {
  ENTER(COPY_FROM_PEER);
  enqueue(queue, do_copy, &(copy_t){to + to_offset, from + from_offset, bytes}, sizeof(copy_t));
  return 0;
}
int wait_peer_event(event_t* event, queue_t* queue) {
  ENTER(WAIT_PEER);
  enqueue(queue, await, &(recording_t){event, latest(event)}, sizeof(recording_t));
  return 0;
}

/* Memory and events that other processes open by name. */
#define MOST_SHARED 1024
static struct { char name[64]; char* start; uint64_t bytes; } shared[MOST_SHARED];
static int made_shared;
static pthread_mutex_t shared_lock = PTHREAD_MUTEX_INITIALIZER;
__attribute__((destructor)) void unlink_all(void) {
  for (int i = 0; i < made_shared; ++i) if (shared[i].name[0]) shm_unlink(shared[i].name);
}
static char* open_shared(const char* name, uint64_t bytes, int flags) {
  const int file = shm_open(name, O_RDWR | flags, 0600);
  if (file < 0 || (flags && ftruncate(file, bytes))) return 0;
  char* start = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return start == MAP_FAILED ? 0 : start;
}
char* allocate_shared(uint64_t bytes) {
  pthread_mutex_lock(&shared_lock);
  const int i = made_shared++;
  snprintf(shared[i].name, 64, "/queued_c_%d_%d", (int)getpid(), i);
  shared[i].start = open_shared(shared[i].name, bytes, O_CREAT | O_EXCL);
  shared[i].bytes = bytes;
  pthread_mutex_unlock(&shared_lock);
  return shared[i].start;
}
int free_shared(char* start) {
  for (int i = 0; i < made_shared; ++i)
    if (shared[i].start == start) {
      shm_unlink(shared[i].name);
      shared[i].start = 0;
      return munmap(start, shared[i].bytes);
    }
  return -1;
}
int export_memory(char* memory, char* handle) {
  ENTER(EXPORT_MEMORY);
  for (int i = 0; i < made_shared; ++i)
    if (shared[i].start == memory) { memcpy(handle, shared[i].name, 64); return 0; }
  return -1;
}
int import_memory(const char* handle, uint64_t bytes, char** memory) {
  ENTER(IMPORT_MEMORY);
  *memory = open_shared(handle, bytes, 0);
  return *memory ? 0 : -1;
}
int close_memory(char* memory) { ENTER(CLOSE_MEMORY); return 0; } /* stays mapped: tests only count the calls */
int create_shared_event(event_t** event) {
  ENTER(CREATE_SHARED);
  *event = (event_t*)allocate_shared(sizeof **event);
  export_memory((char*)*event, (*event)->name);
  pthread_mutexattr_t lock;
  pthread_condattr_t changed;
  pthread_mutexattr_init(&lock);
  pthread_condattr_init(&changed);
  pthread_mutexattr_setpshared(&lock, PTHREAD_PROCESS_SHARED);
  pthread_condattr_setpshared(&changed, PTHREAD_PROCESS_SHARED);
  pthread_mutex_init(&(*event)->lock, &lock);
  pthread_cond_init(&(*event)->changed, &changed);
  return 0;
}
int export_event(event_t* event, char* handle) { ENTER(EXPORT_EVENT); memcpy(handle, event->name, 64); return 0; }
int import_event(const char* handle, event_t** event) {
  ENTER(IMPORT_EVENT);
  *event = (event_t*)open_shared(handle, sizeof **event, 0);
  return *event ? 0 : -1;
}

typedef struct {
  uint64_t kind;
  const uint64_t* after;
  uint64_t after_count;
  kernel_t* kernel;
  uint64_t items[3], group[3];
  const argument_t* arguments;
  uint64_t argument_count;
  char* to;
  uint64_t to_offset;
  char* from;
  uint64_t from_offset, bytes;
  int value;
  void (*function)(void*);
  void* argument;
} graph_command_t;
typedef struct { work_t* work; union { launch_t launch; copy_t copy; host_callback_t call; queue_t* captured; } data; }
  node_t;
typedef struct { uint64_t users, count; node_t nodes[]; } nodes_t; /* shared by a graph and its pending launches */
typedef struct { nodes_t* nodes; } graph_t;
uint64_t edges; /* total of all graphs */
int refuses_updates;

int begin_capture(queue_t** queue) {
  ENTER(BEGIN_CAPTURE);
  *queue = make_queue();
  (*queue)->users = 1;
  return 0;
}
int end_capture(queue_t* queue, queue_t** captured) { ENTER(END_CAPTURE); *captured = queue; return 0; }
static void release(queue_t* captured) {
  if (__sync_sub_and_fetch(&captured->users, 1)) return;
  for (command_t *one = captured->first, *next; one; one = next) {
    next = one->next;
    free(one);
  }
  free(captured);
}
int destroy_captured(queue_t* captured) { ENTER(DESTROY_CAPTURED); release(captured); return 0; }
static void do_captured(void* data) {
  for (command_t* one = (*(queue_t**)data)->first; one; one = one->next) one->work(one->data);
}

static void leave(nodes_t* nodes) {
  if (__sync_sub_and_fetch(&nodes->users, 1)) return;
  for (uint64_t i = 0; i < nodes->count; ++i)
    if (nodes->nodes[i].work == do_captured) release(nodes->nodes[i].data.captured);
  free(nodes);
}
static nodes_t* make_nodes(const graph_command_t* given, uint64_t count) {
  nodes_t* made = calloc(1, sizeof *made + count * sizeof(node_t));
  made->users = 1;
  made->count = count;
  for (uint64_t i = 0; i < count; ++i) {
    node_t* node = &made->nodes[i];
    for (uint64_t j = 0; j < given[i].after_count; ++j) if (given[i].after[j] >= i) return 0;
    edges += given[i].after_count;
    if (given[i].kind == 0) {
      node->work = do_launch;
      if (make_launch(&node->data.launch, given[i].kernel, given[i].items, given[i].group, given[i].arguments,
                      given[i].argument_count)) return 0;
    } else if (given[i].kind == 3) {
      node->work = do_call;
      node->data.call = (host_callback_t){given[i].function, given[i].argument};
    } else if (given[i].kind == 4) {
      node->work = do_captured;
      node->data.captured = given[i].argument;
      __sync_fetch_and_add(&node->data.captured->users, 1);
    } else {
      node->work = given[i].kind == 1 ? do_copy : do_fill;
      node->data.copy = (copy_t){given[i].to + given[i].to_offset, given[i].from + given[i].from_offset,
                                 given[i].bytes, given[i].value};
    }
  }
  return made;
}
int graph_create(const graph_command_t* commands, uint64_t count, graph_t** graph) {
  ENTER(GRAPH_CREATE);
  nodes_t* nodes = make_nodes(commands, count);
  if (!nodes) return -1;
  *graph = calloc(1, sizeof **graph);
  (*graph)->nodes = nodes;
  return 0;
}
int graph_update(graph_t* graph, const graph_command_t* commands, uint64_t count, int* updated) {
  ENTER(GRAPH_UPDATE);
  if (refuses_updates) return 0;
  nodes_t* nodes = make_nodes(commands, count);
  if (!nodes) return -1;
  leave(graph->nodes);
  graph->nodes = nodes;
  *updated = 1;
  return 0;
}
static void do_graph(void* data) {
  nodes_t* nodes = *(nodes_t**)data;
  for (uint64_t i = 0; i < nodes->count; ++i) nodes->nodes[i].work(&nodes->nodes[i].data);
  leave(nodes);
}
int graph_launch(graph_t* graph, queue_t* queue) {
  ENTER(GRAPH_LAUNCH);
  __sync_fetch_and_add(&graph->nodes->users, 1);
  enqueue(queue, do_graph, &graph->nodes, sizeof graph->nodes);
  return 0;
}
int graph_destroy(graph_t* graph) {
  ENTER(GRAPH_DESTROY);
  leave(graph->nodes);
  free(graph);
  return 0;
}

static void do_sleep(void* data) { usleep(*(uint64_t*)data); }
void keep_busy(queue_t* queue, uint64_t microseconds) { enqueue(queue, do_sleep, &microseconds, sizeof microseconds); }

/* A function of a vendor's library: y = a x + y for `count` elements, with a workspace of `count` elements. */
typedef struct { float *y, *scratch; const float* x; float a; uint64_t count; } axpy_t;
static void do_axpy(void* data) {
  const axpy_t* given = data;
  for (uint64_t i = 0; i < given->count; ++i) given->scratch[i] = given->a * given->x[i];
  for (uint64_t i = 0; i < given->count; ++i) given->y[i] += given->scratch[i];
}
int axpy(queue_t* queue, const argument_t* given, uint64_t count) {
  ENTER(AXPY);
  if (count != 5 || given[0].bytes || given[1].bytes || given[2].bytes || given[3].bytes != 4 || given[4].bytes != 8)
    return -2;
  axpy_t made = {0};
  if (*(int64_t*)given[4].data == 0) return 0;
  made.y = (float*)(given[0].memory + given[0].offset);
  made.scratch = (float*)(given[1].memory + given[1].offset);
  made.x = (const float*)(given[2].memory + given[2].offset);
  made.a = *(const float*)given[3].data;
  made.count = *(const uint64_t*)given[4].data;
  enqueue(queue, do_axpy, &made, sizeof made);
  return 0;
}
"""

_library: list[ctypes.CDLL] = []
gate = threading.Event()  # compilation waits for it
gate.set()


def library() -> ctypes.CDLL:
    if not _library:
        made = built(LAUNCHER)
        made.create_queue.restype = made.allocate_shared.restype = ctypes.c_void_p
        _library.append(made)
        ctypes.c_void_p.in_dll(made, "has_gil").value = address(ctypes.pythonapi.PyGILState_Check)
    return _library[0]


def called(name: str) -> int:
    return int((ctypes.c_uint64 * len(NAMES)).in_dll(library(), "called")[NAMES.index(name)])


def answer(name: str, status: int) -> None:
    """Sets the status that the function returns from now on; with 0 it does its work."""
    (ctypes.c_int * len(NAMES)).in_dll(library(), "answers")[NAMES.index(name)] = status


def with_gil() -> int:
    return int(ctypes.c_uint64.in_dll(library(), "with_gil").value)


priorities: list[int] = []  # of the created streams


class Stream:
    def __init__(self) -> None:
        self.native = library().create_queue()
        self.given = ctypes.c_void_p(self.native)


class Event:
    """An event that the driver's Python methods create."""

    def __init__(self) -> None:
        self.native = ctypes.c_void_p()
        library().create_event(1, ctypes.byref(self.native))


class QueuedDevice(PlainCDevice):
    def __init__(self) -> None:
        host_accessible = os.environ.get("QUEUED_C_HOST_ACCESSIBLE") == "1"
        self.properties = DeviceProperties(
            name="Queued C accelerator",
            total_memory=1 << 30,
            address_space="host" if host_accessible else "synthetic",
            dialect=PlainC,
            target=Target(simt=False, local_memory=0, max_argument_bytes=1 << 16),
        )
        more = [name for group in os.environ.get("QUEUED_C_HANDS_OVER", "").split() for name in globals()[group]]
        self.exports = "export_memory" in more
        self.shares = self.exports or host_accessible
        without = os.environ.get("QUEUED_C_WITHOUT")
        names = [name for name in ("launch", "copy", "fill", "flush", *more) if name != without]
        self.native_launcher = NativeLauncher(
            api="c", functions={name: address(library()[name]) for name in names}
        )

    def allocate(self, nbytes: int) -> Any:
        if not self.shares:
            return super().allocate(nbytes)
        start = library().allocate_shared(ctypes.c_uint64(nbytes))
        if not self.exports:
            library().unlink_all()
        return (ctypes.c_char * nbytes).from_address(start)

    def free(self, handle: Any) -> None:
        if self.shares:
            assert library().free_shared(ctypes.c_void_p(ctypes.addressof(handle))) == 0

    def address(self, handle: Any) -> int:
        return ctypes.addressof(handle)

    def can_access_peer(self, peer: Any) -> bool:
        return isinstance(peer, QueuedDevice)

    def can_wait_for_peer(self, peer: Any) -> bool:
        return isinstance(peer, QueuedDevice)

    def compile(self, text: str, entry: str) -> object:
        assert gate.wait(60)
        return built(text)[entry]

    def copy_in(self, handle: Any, offset: int, host_memory: memoryview, stream: Any) -> None:
        source = ctypes.c_void_p(numpy.frombuffer(host_memory, numpy.uint8).ctypes.data)
        library().copy_in(stream.given, handle, ctypes.c_uint64(offset), source, ctypes.c_uint64(len(host_memory)))

    def copy_out(self, handle: Any, offset: int, host_memory: memoryview, stream: Any) -> None:
        to = ctypes.c_void_p(numpy.frombuffer(host_memory, numpy.uint8).ctypes.data)
        library().copy_out(stream.given, to, handle, ctypes.c_uint64(offset), ctypes.c_uint64(len(host_memory)))

    def create_stream(self, priority: int) -> Stream:
        priorities.append(priority)
        return Stream()

    def native_stream(self, stream: Any) -> int:
        return stream.native

    def query_stream(self, stream: Any) -> bool:
        return bool(library().is_done(stream.given))

    def synchronize_stream(self, stream: Any) -> None:
        library().finish(stream.given)

    def create_event(self, timing: bool) -> Event:
        return Event()

    def record_event(self, event: Any, stream: Any) -> None:
        library().record_event(event.native, stream.given)

    def wait_event(self, event: Any, stream: Any) -> None:
        library().wait_event(event.native, stream.given)

    def query_event(self, event: Any) -> bool:
        reached = ctypes.c_int()
        library().query_event(event.native, ctypes.byref(reached))
        return bool(reached.value)

    def synchronize_event(self, event: Any) -> None:
        library().synchronize_event(event.native)

    def elapsed_ms(self, start: Any, end: Any) -> float:
        milliseconds = ctypes.c_double()
        library().elapsed(start.native, end.native, ctypes.byref(milliseconds))
        return milliseconds.value

    def sleep(self, milliseconds: float, stream: Any) -> None:
        library().keep_busy(stream.given, ctypes.c_uint64(int(milliseconds * 1000)))


class QueuedDriver(Driver):
    def devices(self) -> list[QueuedDevice]:
        return [QueuedDevice() for _ in range(int(os.environ.get("QUEUED_C_DEVICES", "1")))]
