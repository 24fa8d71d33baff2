"""Tests the emulated CUDA driver: graphs and stream capture."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Sequence

import driver_api as api
import pytest

UNSUPPORTED, INVALIDATED, MERGE, UNMATCHED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED_EVENT, WRONG_THREAD = range(
    900, 909
)
ILLEGAL_STATE, UPDATE_FAILURE = 401, 910
GLOBAL, THREAD_LOCAL, RELAXED = range(3)

ADD = 'extern "C" __global__ void add(int* at, int by) { at[threadIdx.x] += by; }'
TIMES = 'extern "C" __global__ void times(int* at, int by) { at[threadIdx.x] *= by; }'


def _ints(memory: int, count: int = 4) -> list[int]:
    return list(struct.unpack(f"{count}i", api.read(memory, 4 * count)))


def _zeros(count: int = 4) -> int:
    memory = api.allocate(4 * count)
    api.write(memory, bytes(4 * count))
    return memory


class KernelNode(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_void_p), ("sizes", ctypes.c_uint * 7), ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p), ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p),
    )  # fmt: skip

    def __init__(self, function: int, memory: int, by: int) -> None:
        self.values = ctypes.c_uint64(memory), ctypes.c_int(by)
        self.pointers = (ctypes.c_void_p * 2)(*map(ctypes.addressof, self.values))
        super().__init__(function, (ctypes.c_uint * 7)(1, 1, 1, 4, 1, 1, 0), ctypes.addressof(self.pointers))


class FillNode(ctypes.Structure):
    _fields_ = (
        ("to", ctypes.c_uint64), ("pitch", ctypes.c_size_t), ("value", ctypes.c_uint), ("size", ctypes.c_uint),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip


class CopyEnd(ctypes.Structure):
    _fields_ = (
        ("position", ctypes.c_size_t * 4), ("type", ctypes.c_int), ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64), ("array", ctypes.c_void_p), ("reserved", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip


class CopyNode(ctypes.Structure):
    _fields_ = (("source", CopyEnd), ("to", CopyEnd), ("extent", ctypes.c_size_t * 3))


class HostNode(ctypes.Structure):
    _fields_ = (("function", ctypes.c_void_p), ("argument", ctypes.c_void_p))


class UpdateResult(ctypes.Structure):
    _fields_ = (("result", ctypes.c_int), ("node", ctypes.c_void_p), ("source", ctypes.c_void_p))


def _graph() -> int:
    return int(api.result("cuGraphCreate", 0))


def _node(name: str, graph: int, after: Sequence[int], *parameters: object) -> int:
    dependencies = (ctypes.c_void_p * max(len(after), 1))(*after)
    given = [ctypes.byref(one) if isinstance(one, ctypes.Structure) else one for one in parameters]
    return int(api.result(f"cuGraphAdd{name}", graph, dependencies, len(after), *given))


def _instantiate(graph: int) -> int:
    return int(api.result("cuGraphInstantiateWithFlags", graph, 0))


def _launch(graph: int, stream: int = 0) -> None:
    api.call("cuGraphLaunch", graph, stream)
    api.synchronize(stream)


def _nodes(graph: int) -> list[int]:
    count = ctypes.c_size_t()
    api.call("cuGraphGetNodes", graph, None, ctypes.byref(count))
    nodes = (ctypes.c_uint64 * max(count.value, 1))()
    api.call("cuGraphGetNodes", graph, nodes, ctypes.byref(count))
    return list(nodes)[: count.value]


def _types(graph: int) -> list[int]:
    types = []
    for node in _nodes(graph):
        value = ctypes.c_int()
        api.call("cuGraphNodeGetType", node, ctypes.byref(value))
        types.append(value.value)
    return types


def _dependencies(node: int, name: str = "Dependencies") -> set[int]:
    count = ctypes.c_size_t(16)
    nodes = (ctypes.c_uint64 * 16)()
    api.call(f"cuGraphNodeGet{name}_v2", node, nodes, None, ctypes.byref(count))
    return set(list(nodes)[: count.value])


# --- graphs


def test_nodes_of_all_kinds(context: int) -> None:
    memory, copied, host = _zeros(), _zeros(), api.pinned(16)
    add, times, event = api.kernel(ADD, "add"), api.kernel(TIMES, "times"), api.event()
    seen: list[list[int]] = []
    function = api.HostFunction(lambda argument: seen.append(list((ctypes.c_int * 4).from_address(argument))))
    graph = _graph()
    fill = _node("MemsetNode", graph, [], FillNode(memory, 0, 5, 4, 4, 1), context)
    first = _node("KernelNode_v2", graph, [fill], KernelNode(add, memory, 2))
    empty = _node("EmptyNode", graph, [first])
    second = _node("KernelNode_v2", graph, [empty], KernelNode(times, memory, 3))
    copy = CopyNode(CopyEnd(type=2, device=memory), CopyEnd(type=2, device=copied), (ctypes.c_size_t * 3)(16, 1, 1))
    third = _node("MemcpyNode", graph, [second], copy, context)
    copy = CopyNode(CopyEnd(type=2, device=copied), CopyEnd(type=1, host=host), (ctypes.c_size_t * 3)(16, 1, 1))
    fourth = _node("MemcpyNode", graph, [third], copy, context)
    last = _node("HostNode", graph, [fourth], HostNode(ctypes.cast(function, ctypes.c_void_p), host))
    recorded = _node("EventRecordNode", graph, [last], event)
    _node("EventWaitNode", graph, [recorded], event)
    assert _types(graph) == [2, 0, 5, 0, 1, 1, 3, 7, 6]
    assert _dependencies(second) == {empty}
    assert _dependencies(second, "DependentNodes") == {third}
    executable = _instantiate(graph)
    api.call("cuGraphDestroy", graph)
    for _ in range(3):
        _launch(executable, api.stream())
    assert seen == [[21] * 4] * 3
    api.call("cuEventSynchronize", event)
    api.call("cuGraphExecDestroy", executable)
    assert api.status("cuGraphLaunch", executable, 0) == api.INVALID_VALUE


def test_launches_are_asynchronous_and_in_order() -> None:
    memory, graph, stream, other = _zeros(), _graph(), api.stream(), api.stream()
    _node("KernelNode_v2", graph, [], KernelNode(api.kernel(ADD, "add"), memory, 1))
    executable = _instantiate(graph)
    with api.blocked(stream):
        for _ in range(5):
            api.call("cuGraphLaunch", executable, stream)
        api.call("cuGraphLaunch", executable, other)  # launches of one graph do not overlap
        assert api.status("cuStreamQuery", other) == api.NOT_READY
        assert _raw(memory) == bytes(16)
    api.synchronize(other)
    assert _ints(memory) == [6] * 4


def _raw(memory: int) -> bytes:
    return ctypes.string_at(memory, 16)  # without the default stream, which would wait


def test_updates_of_parameters(context: int) -> None:
    memory, other, graph = _zeros(), _zeros(), _graph()
    add, times = api.kernel(ADD, "add"), api.kernel(TIMES, "times")
    fill = _node("MemsetNode", graph, [], FillNode(memory, 0, 1, 4, 4, 1), context)
    node = _node("KernelNode_v2", graph, [fill], KernelNode(add, memory, 2))
    executable = _instantiate(graph)
    _launch(executable)
    assert _ints(memory) == [3] * 4
    update = KernelNode(times, other, 9)
    api.call("cuGraphExecKernelNodeSetParams_v2", executable, node, ctypes.byref(update))
    api.call("cuGraphExecMemsetNodeSetParams", executable, fill, ctypes.byref(FillNode(other, 0, 7, 4, 4, 1)), context)
    _launch(executable)
    assert (_ints(memory), _ints(other)) == ([3] * 4, [63] * 4)
    got = KernelNode(0, 0, 0)
    api.call("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(got))
    assert (got.function, list(got.sizes)) == (add, [1, 1, 1, 4, 1, 1, 0])
    by = ctypes.cast(got.arguments, ctypes.POINTER(ctypes.POINTER(ctypes.c_int)))[1][0]
    assert by == 2  # of the graph, which has not changed
    wrong = FillNode(memory, 0, 1, 4, 4, 1)
    assert api.status("cuGraphExecMemsetNodeSetParams", executable, node, ctypes.byref(wrong), context) == 1
    assert api.status("cuGraphExecKernelNodeSetParams_v2", executable, fill, ctypes.byref(update)) == 1


def test_updates_by_another_graph(context: int) -> None:
    memory, add = _zeros(), api.kernel(ADD, "add")

    def make(by: int, kinds: str) -> int:
        graph, last = _graph(), []
        for kind in kinds:
            if kind == "k":
                last = [_node("KernelNode_v2", graph, last, KernelNode(add, memory, by))]
            else:
                last = [_node("MemsetNode", graph, last, FillNode(memory, 0, by, 4, 4, 1), context)]
        return graph

    executable = _instantiate(make(1, "fkk"))
    _launch(executable)
    assert _ints(memory) == [3] * 4
    info = UpdateResult()
    api.call("cuGraphExecUpdate_v2", executable, make(5, "fkk"), ctypes.byref(info))
    _launch(executable)
    assert _ints(memory) == [15] * 4
    for kinds, result in (("fk", 2), ("ffk", 3)):
        assert api.status("cuGraphExecUpdate_v2", executable, make(9, kinds), ctypes.byref(info)) == UPDATE_FAILURE
        assert info.result == result
    _launch(executable)
    assert _ints(memory) == [15] * 4


def test_disabled_nodes() -> None:
    memory, graph, add = _zeros(), _graph(), api.kernel(ADD, "add")
    nodes = [_node("KernelNode_v2", graph, [], KernelNode(add, memory, by)) for by in (1, 10)]
    executable = _instantiate(graph)
    api.call("cuGraphNodeSetEnabled", executable, nodes[1], 0)
    _launch(executable)
    assert _ints(memory) == [1] * 4
    api.call("cuGraphNodeSetEnabled", executable, nodes[1], 1)
    _launch(executable)
    assert _ints(memory) == [12] * 4


def test_child_graphs_and_clones() -> None:
    memory, child, graph = _zeros(), _graph(), _graph()
    add, times = api.kernel(ADD, "add"), api.kernel(TIMES, "times")
    _node("KernelNode_v2", child, [], KernelNode(add, memory, 3))
    first = _node("ChildGraphNode", graph, [], child)
    _node("KernelNode_v2", graph, [first], KernelNode(times, memory, 2))
    clone = api.result("cuGraphClone", graph)
    api.call("cuGraphDestroyNode", first)
    assert _types(graph) == [0]
    assert _types(clone) == [4, 0]
    _launch(_instantiate(clone))
    assert _ints(memory) == [6] * 4


def test_updates_of_child_graphs(context: int) -> None:
    memory, add = _zeros(), api.kernel(ADD, "add")

    def child(*numbers: int) -> int:
        made, last = _graph(), []
        for one in numbers:
            last = [_node("KernelNode_v2", made, last, KernelNode(add, memory, one))]
        return made

    graph = _graph()
    first = _node("ChildGraphNode", graph, [], child(1, 2))
    other = _node("MemsetNode", graph, [first], FillNode(memory, 0, 0, 4, 1, 1), context)
    executable = _instantiate(graph)
    _launch(executable)
    assert _ints(memory) == [0, 3, 3, 3]
    update = child(10, 20)
    api.call("cuGraphExecChildGraphNodeSetParams", executable, first, update)
    api.call("cuGraphDestroy", update)
    for step in (1, 2):
        _launch(executable)
        assert _ints(memory) == [0, *[3 + 30 * step] * 3]
    for wrong in ((first, child(1)), (first, 4096), (other, child(1, 2))):
        assert api.status("cuGraphExecChildGraphNodeSetParams", executable, *wrong) == api.INVALID_VALUE
    _launch(executable)
    assert _ints(memory) == [0, *[93] * 3]


class UserObject:
    """A user object with references of the program. `released`: the calls of its function, with what CUDA answered."""

    def __init__(self, references: int = 1) -> None:
        self.released: list[int] = []
        self._function = api.HostFunction(lambda _: self.released.append(api.status("cuCtxSynchronize")))
        self.handle = int(api.result("cuUserObjectCreate", None, self._function, references, 1))

    def retain(self, graph: int, move: bool = True) -> None:
        api.call("cuGraphRetainUserObject", graph, self.handle, 1, int(move))


def test_a_graph_keeps_user_objects_until_its_launches_are_complete() -> None:
    memory, child, graph, stream = _zeros(), _graph(), _graph(), api.stream()
    _node("KernelNode_v2", child, [], KernelNode(api.kernel(ADD, "add"), memory, 1))
    of_child, of_graph = UserObject(), UserObject()
    of_child.retain(child)
    of_graph.retain(graph)
    _node("ChildGraphNode", graph, [], child)
    api.call("cuGraphDestroy", child)
    executable = _instantiate(graph)
    api.call("cuGraphDestroy", graph)
    with api.blocked(stream):
        api.call("cuGraphLaunch", executable, stream)
        api.call("cuGraphExecDestroy", executable)
        assert (of_child.released, of_graph.released) == ([], [])
    api.synchronize(stream)
    api.call("cuStreamDestroy_v2", stream)  # its thread ends
    for one in (of_child, of_graph):
        for _ in range(1000):
            if one.released:
                break
            time.sleep(0.01)
        assert one.released == [api.NOT_PERMITTED]  # the function must not call CUDA


def test_an_update_of_a_child_graph_replaces_its_user_objects() -> None:
    graph, children, objects = _graph(), [_graph(), _graph()], [UserObject(), UserObject()]
    for child, one in zip(children, objects, strict=True):
        _node("EmptyNode", child, [])
        one.retain(child)
    node = _node("ChildGraphNode", graph, [], children[0])
    executable = _instantiate(graph)
    api.call("cuGraphExecChildGraphNodeSetParams", executable, node, children[1])
    for one in (graph, *children):
        api.call("cuGraphDestroy", one)
    assert [len(one.released) for one in objects] == [1, 0]
    api.call("cuGraphExecDestroy", executable)
    assert [len(one.released) for one in objects] == [1, 1]


def test_references_to_user_objects() -> None:
    graph, one, made = _graph(), UserObject(2), ctypes.c_uint64()
    one.retain(graph, move=False)
    one.retain(graph)
    api.call("cuUserObjectRelease", one.handle, 1)
    assert api.status("cuUserObjectRelease", one.handle, 1) == api.INVALID_VALUE
    assert one.released == []
    api.call("cuGraphDestroy", graph)
    assert len(one.released) == 1
    function = api.HostFunction(lambda _: None)
    for wrong in ((None, None, 1, 1), (None, function, 0, 1), (None, function, 1, 0)):
        assert api.status("cuUserObjectCreate", ctypes.byref(made), *wrong) == api.INVALID_VALUE
    left = UserObject()
    for number, move in ((0, 1), (2, 1), (1, 2)):
        assert api.status("cuGraphRetainUserObject", _graph(), left.handle, number, move) == api.INVALID_VALUE
    assert left.released == []
    api.call("cuUserObjectRelease", left.handle, 1)
    assert len(left.released) == 1


def test_dependencies() -> None:
    graph = _graph()
    nodes = [_node("EmptyNode", graph, []) for _ in range(3)]

    def edge(name: str, begin: int, end: int) -> int:
        one, other = ctypes.c_uint64(nodes[begin]), ctypes.c_uint64(nodes[end])
        return api.status(f"cuGraph{name}Dependencies_v2", graph, ctypes.byref(one), ctypes.byref(other), None, 1)

    assert edge("Add", 2, 1) == 0
    assert edge("Add", 1, 0) == 0
    assert edge("Add", 2, 1) == api.INVALID_VALUE
    assert edge("Add", 1, 1) == api.INVALID_VALUE
    count = ctypes.c_size_t()
    api.call("cuGraphGetEdges_v2", graph, None, None, None, ctypes.byref(count))
    assert count.value == 2
    roots = (ctypes.c_uint64 * 1)()
    count.value = 1
    api.call("cuGraphGetRootNodes", graph, roots, ctypes.byref(count))
    assert roots[0] == nodes[2]
    _instantiate(graph)
    assert edge("Add", 0, 2) == 0  # a cycle
    made = ctypes.c_uint64()
    assert api.status("cuGraphInstantiateWithFlags", ctypes.byref(made), graph, 0) == api.INVALID_VALUE
    assert edge("Remove", 0, 2) == 0
    assert edge("Remove", 0, 2) == api.INVALID_VALUE
    _instantiate(graph)


def test_wrong_nodes(context: int) -> None:
    graph, other, made = _graph(), _graph(), ctypes.c_uint64()
    foreign = (ctypes.c_void_p * 1)(_node("EmptyNode", other, []))
    assert api.status("cuGraphAddEmptyNode", ctypes.byref(made), graph, foreign, 1) == api.INVALID_VALUE
    assert api.status("cuGraphAddEmptyNode", ctypes.byref(made), 4096, None, 0) == api.INVALID_VALUE
    fill = FillNode(4096, 0, 1, 4, 4, 1)
    arguments = (ctypes.byref(made), graph, None, 0)
    assert api.status("cuGraphAddMemsetNode", *arguments, ctypes.byref(fill), context) == api.INVALID_VALUE
    assert api.status("cuGraphAddMemsetNode", *arguments, ctypes.byref(fill), 4096) == api.INVALID_CONTEXT
    assert api.status("cuGraphAddEventRecordNode", *arguments, 4096) == api.INVALID_HANDLE
    node = KernelNode(4096, 0, 0)
    assert api.status("cuGraphAddKernelNode_v2", *arguments, ctypes.byref(node)) == api.INVALID_HANDLE
    assert _nodes(graph) == []


def test_errors_in_graphs_do_not_block_events() -> None:
    graph, event = _graph(), api.event()
    first = _node("KernelNode_v2", graph, [], KernelNode(api.kernel(ADD, "add"), 4096, 1))
    _node("EventRecordNode", graph, [first], event)
    api.call("cuGraphLaunch", _instantiate(graph), 0)
    assert api.status("cuEventSynchronize", event) == api.ILLEGAL_ADDRESS


# --- capture


def _begin(stream: int, mode: int = GLOBAL) -> None:
    api.call("cuStreamBeginCapture_v2", stream, mode)


def _end(stream: int) -> tuple[int, int]:
    graph = ctypes.c_uint64()
    return api.status("cuStreamEndCapture", stream, ctypes.byref(graph)), graph.value


def _state(stream: int) -> int:
    value = ctypes.c_int()
    api.call("cuStreamIsCapturing", stream, ctypes.byref(value))
    return value.value


def test_captured_work_is_not_executed_but_launched_later() -> None:
    memory, stream, host = _zeros(), api.stream(), api.pinned(16)
    add = api.kernel(ADD, "add")
    _begin(stream)
    assert _state(stream) == 1
    api.call("cuMemsetD32Async", memory, 4, 4, stream)
    assert api.launch(add, (1,), (4,), memory, ctypes.c_int(6), on=stream) == 0
    api.call("cuMemcpyDtoHAsync_v2", host, memory, 16, stream)
    error, graph = _end(stream)
    assert error == 0
    assert _state(stream) == 0
    assert _types(graph) == [2, 0, 1]
    assert _raw(memory) == bytes(16)
    executable = _instantiate(graph)
    _launch(executable, stream)
    assert list((ctypes.c_int * 4).from_address(host)) == [10] * 4


def test_capture_of_two_streams() -> None:
    memory, first, second = _zeros(), api.stream(), api.stream()
    add, fork, join = api.kernel(ADD, "add"), api.event(), api.event()
    _begin(first)
    assert api.launch(add, (1,), (4,), memory, ctypes.c_int(1), on=first) == 0
    api.call("cuEventRecord", fork, first)
    api.call("cuStreamWaitEvent", second, fork, 0)
    assert _state(second) == 1
    assert api.status("cuEventQuery", fork) == CAPTURED_EVENT
    assert api.launch(add, (1,), (4,), memory, ctypes.c_int(10), on=second) == 0
    assert api.launch(add, (1,), (4,), memory, ctypes.c_int(100), on=first) == 0
    api.call("cuEventRecord", join, second)
    api.call("cuStreamWaitEvent", first, join, 0)
    assert api.launch(add, (1,), (4,), memory, ctypes.c_int(1000), on=first) == 0
    error, graph = _end(first)
    assert error == 0
    assert _state(second) == 0
    nodes = _nodes(graph)
    assert [_dependencies(one) for one in nodes] == [set(), {nodes[0]}, {nodes[0]}, {nodes[1], nodes[2]}]
    _launch(_instantiate(graph))
    assert _ints(memory) == [1111] * 4
    assert api.status("cuStreamWaitEvent", second, join, 0) == CAPTURED_EVENT
    api.call("cuEventRecord", join, second)  # can be used again
    api.call("cuEventSynchronize", join)


def test_facts_of_a_capture() -> None:
    stream, memory = api.stream(), _zeros()
    _begin(stream)
    api.call("cuMemsetD32Async", memory, 4, 4, stream)
    state, number, graph, count = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
    dependencies = ctypes.POINTER(ctypes.c_uint64)()
    given = [ctypes.byref(one) for one in (state, number, graph, dependencies)]
    api.call("cuStreamGetCaptureInfo_v3", stream, *given, None, ctypes.byref(count))
    assert (state.value, count.value) == (1, 1)
    assert [dependencies[0]] == _nodes(graph.value)
    added = _node("EmptyNode", graph.value, [])
    both = (ctypes.c_uint64 * 1)(added)
    api.call("cuStreamUpdateCaptureDependencies_v2", stream, both, None, 1, 0)
    api.call("cuMemsetD32Async", memory, 5, 4, stream)
    error, made = _end(stream)
    assert (error, made) == (0, graph.value)
    nodes = _nodes(made)
    assert _dependencies(nodes[2]) == set(nodes[:2])


def test_capture_to_an_existing_graph() -> None:
    stream, memory, graph = api.stream(), _zeros(), _graph()
    first = _node("EmptyNode", graph, [])
    after = (ctypes.c_uint64 * 1)(first)
    api.call("cuStreamBeginCaptureToGraph", stream, graph, after, None, 1, RELAXED)
    api.call("cuMemsetD32Async", memory, 4, 4, stream)
    assert _end(stream) == (0, graph)
    assert _dependencies(_nodes(graph)[1]) == {first}


@pytest.mark.parametrize("call", ["cuStreamQuery", "cuStreamSynchronize"])
def test_waiting_for_a_captured_stream_invalidates_the_capture(call: str) -> None:
    stream = api.stream()
    _begin(stream)
    assert api.status(call, stream) == UNSUPPORTED
    assert _state(stream) == 2
    assert api.status("cuMemsetD8Async", _unchecked_memory(), 0, 4, stream) == INVALIDATED
    assert _end(stream) == (INVALIDATED, 0)
    assert _state(stream) == 0
    api.synchronize(stream)


def _unchecked_memory() -> int:
    """Allocate during a capture, which only a relaxed thread can."""
    mode = ctypes.c_int(RELAXED)
    api.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        return api.allocate(4)
    finally:
        api.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


@pytest.mark.parametrize(
    ("mode", "same_thread", "other_thread"),
    [(GLOBAL, UNSUPPORTED, UNSUPPORTED), (THREAD_LOCAL, UNSUPPORTED, 0), (RELAXED, 0, 0)],
)
def test_modes_of_captures(mode: int, same_thread: int, other_thread: int, context: int) -> None:
    def allocate() -> None:
        address = ctypes.c_uint64()
        api.call("cuCtxSetCurrent", context)
        errors.append(api.status("cuMemAlloc_v2", ctypes.byref(address), 4))

    for is_other, expected in ((False, same_thread), (True, other_thread)):
        errors: list[int] = []
        stream = api.stream()
        _begin(stream, mode)
        if is_other:
            thread = threading.Thread(target=allocate)
            thread.start()
            thread.join()
        else:
            allocate()
        assert errors == [expected]
        assert _end(stream)[0] == (INVALIDATED if expected else 0)


def test_wrong_captures(context: int) -> None:
    first, second, fork = api.stream(), api.stream(), api.event()
    memory = _zeros()
    assert api.status("cuStreamBeginCapture_v2", 0, GLOBAL) == UNSUPPORTED
    assert api.status("cuStreamBeginCapture_v2", first, 3) == api.INVALID_VALUE
    assert _end(first) == (ILLEGAL_STATE, 0)
    _begin(first)
    assert api.status("cuStreamBeginCapture_v2", first, GLOBAL) == ILLEGAL_STATE
    api.call("cuEventRecord", fork, first)
    api.call("cuStreamWaitEvent", second, fork, 0)
    api.call("cuMemsetD32Async", memory, 4, 4, second)
    assert _end(first) == (UNJOINED, 0)
    assert (_state(first), _state(second)) == (0, 0)
    _begin(first, RELAXED)
    api.call("cuEventRecord", fork, first)
    api.call("cuStreamWaitEvent", second, fork, 0)
    assert _end(second) == (UNMATCHED, 0)
    assert _end(first) == (INVALIDATED, 0)


def test_a_capture_is_isolated() -> None:
    first, second, outside, inside = api.stream(), api.stream(), api.event(), api.event()
    api.call("cuEventRecord", outside, second)
    _begin(first)
    assert api.status("cuStreamWaitEvent", first, outside, 0) == ISOLATION
    assert _end(first)[0] == INVALIDATED
    _begin(first)
    _begin(second)
    api.call("cuEventRecord", inside, first)
    assert api.status("cuStreamWaitEvent", second, inside, 0) == MERGE
    assert (_end(first)[0], _end(second)[0]) == (INVALIDATED, INVALIDATED)


def test_external_events_are_nodes() -> None:
    stream, event = api.stream(), api.event()
    _begin(stream)
    api.call("cuStreamWaitEvent", stream, event, 1)
    api.call("cuEventRecordWithFlags", event, stream, 1)
    error, graph = _end(stream)
    assert (error, _types(graph)) == (0, [6, 7])
    assert api.status("cuEventRecordWithFlags", event, stream, 1) == api.INVALID_VALUE  # not captured


def test_the_legacy_stream_cannot_be_used_during_the_capture_of_a_blocking_stream() -> None:
    blocking, free, memory = api.stream(0), api.stream(), _zeros()
    _begin(blocking, RELAXED)
    assert api.status("cuMemsetD8Async", memory, 0, 4, 0) == IMPLICIT
    assert _end(blocking)[0] == INVALIDATED
    _begin(free, RELAXED)
    api.call("cuMemsetD8Async", memory, 0, 4, 0)
    assert _end(free)[0] == 0


def test_a_capture_ends_in_its_thread() -> None:
    stream, seen = api.stream(), []
    _begin(stream)
    current = api.result("cuCtxGetCurrent")

    def run() -> None:
        api.call("cuCtxSetCurrent", current)
        seen.append(_end(stream)[0])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [WRONG_THREAD]
    assert _end(stream)[0] == 0


def test_a_capture_ends_with_its_stream() -> None:
    stream = api.stream()
    _begin(stream, THREAD_LOCAL)
    api.call("cuMemsetD8Async", _unchecked_memory(), 0, 4, stream)
    api.call("cuStreamDestroy_v2", stream)
    api.allocate(4)  # which a capture would refuse


def test_a_captured_stream_can_be_destroyed() -> None:
    first, second, fork, memory = api.stream(), api.stream(), api.event(), _zeros()
    _begin(first)
    api.call("cuEventRecord", fork, first)
    api.call("cuStreamWaitEvent", second, fork, 0)
    api.call("cuStreamDestroy_v2", second)
    api.call("cuMemsetD8Async", memory, 0, 4, first)
    error, graph = _end(first)
    assert (error, _types(graph)) == (0, [2])
