"""Tests the emulated NCCL with two communicators in one process: results, order in streams, arguments, errors."""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import driver_api as api
import pytest

CUDA_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, IN_PROGRESS = 1, 3, 4, 5, 7  # ncclResult_t
FLOAT, INT64 = 7, 4  # ncclDataType_t
SUM, AVERAGE = 0, 4  # ncclRedOp_t

Call = Callable[..., int]


class UniqueId(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", ctypes.c_int),
    )  # fmt: skip


@dataclass
class Member:
    """A rank: its communicator, the context of its device, a stream, and 4 KiB of memory."""

    communicator: int
    context: int
    stream: int
    memory: int

    def use(self) -> None:
        api.call("cuCtxSetCurrent", self.context)


@pytest.fixture
def nccl(libraries: Path) -> Call:
    library = ctypes.CDLL(str(libraries / "libnccl.so.2"))
    return lambda name, *given: int(
        library[name](*(ctypes.c_int64(one) if isinstance(one, int) else one for one in given))
    )


def state(nccl: Call, member: Member) -> int:
    error = ctypes.c_int()
    assert nccl("ncclCommGetAsyncError", member.communicator, ctypes.byref(error)) == 0
    return error.value


def settled(nccl: Call, members: Sequence[Member]) -> list[int]:
    """Returns the states when no call is in progress."""
    deadline = time.monotonic() + 30
    while IN_PROGRESS in (states := [state(nccl, one) for one in members]):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return states


def config(**changed: int) -> Config:
    return Config(**{"size": 24, "magic": 0xCAFEBEEF, "version": 21400, "blocking": 0} | changed)


def joined(nccl: Call, contexts: Sequence[int]) -> list[Member]:
    """Starts to join a rank for each context."""
    identifier, members = UniqueId(), []
    assert nccl("ncclGetUniqueId", ctypes.byref(identifier)) == 0
    for rank, context in enumerate(contexts):
        api.call("cuCtxSetCurrent", context)
        made = ctypes.c_uint64()
        given = (ctypes.byref(made), len(contexts), identifier, rank, ctypes.byref(config()))
        assert nccl("ncclCommInitRankConfig", *given) == IN_PROGRESS
        members.append(Member(made.value, context, api.stream(), api.allocate(4096)))
    return members


@pytest.fixture
def members(nccl: Call, context: int, second: int) -> list[Member]:
    made = joined(nccl, (context, second))
    assert settled(nccl, made) == [0, 0]
    return made


def leave(nccl: Call, members: Sequence[Member], call: str = "ncclCommDestroy") -> None:
    for one in members:
        one.use()
        assert nccl(call, one.communicator) == 0


def reduce(nccl: Call, member: Member, **changed: int) -> int:
    """All-reduces three numbers into the memory behind them."""
    member.use()
    given = {
        "from": member.memory, "to": member.memory + 512, "count": 3, "dtype": FLOAT, "operation": SUM,
        "communicator": member.communicator, "stream": member.stream,
    } | changed  # fmt: skip
    return nccl("ncclAllReduce", *given.values())


def test_collectives_are_in_the_order_of_the_streams(nccl: Call, members: list[Member]) -> None:
    first, other = members
    other.use()
    api.write(other.memory, struct.pack("3f", 10, 20, 30))
    first.use()
    with api.blocked(first.stream) as release:
        for operation in (SUM, AVERAGE):
            for one in members:
                assert reduce(nccl, one, operation=operation, to=one.memory + 512 * (1 + operation)) == IN_PROGRESS
            assert settled(nccl, members) == [0, 0]
        first.use()
        api.write(first.memory, struct.pack("3f", 1, 2, 3))
        other.use()
        assert api.status("cuStreamQuery", other.stream) == api.NOT_READY  # waits for the first
        first.use()
        release()
        api.synchronize(first.stream)
    other.use()
    api.synchronize(other.stream)
    for one in members:
        one.use()
        assert struct.unpack("3f", api.read(one.memory + 512, 12)) == (11, 22, 33)
        assert struct.unpack("3f", api.read(one.memory + 512 * 5, 12)) == (5.5, 11, 16.5)
    leave(nccl, members)


def test_groups_send_and_receive_at_the_same_time(nccl: Call, members: list[Member]) -> None:
    """Messages that do not fit into a socket: both ranks send first."""
    count, memory = 1 << 20, []
    for rank, one in enumerate(members):
        one.use()
        memory.append(api.allocate(16 * count))
        api.write(memory[rank], struct.pack("q", rank + 1) * count)
        assert nccl("ncclGroupStart") == 0
        for peer in range(2):  # also to itself
            to = memory[rank] + 8 * count
            assert nccl("ncclSend", memory[rank], count // 2, INT64, peer, one.communicator, one.stream) == 0
            given = (to + 4 * count * peer, count // 2, INT64, peer, one.communicator, one.stream)
            assert nccl("ncclRecv", *given) == 0
        assert nccl("ncclGroupEnd") == IN_PROGRESS
    assert settled(nccl, members) == [0, 0]
    for rank, one in enumerate(members):
        one.use()
        api.synchronize(one.stream)
        found = api.read(memory[rank] + 8 * count, 8 * count)
        assert found == struct.pack("q", 1) * (count // 2) + struct.pack("q", 2) * (count // 2)
    leave(nccl, members)


def test_arguments_are_checked(nccl: Call, members: list[Member]) -> None:
    host = ctypes.create_string_buffer(64)
    one = members[0]
    one.use()
    assert reduce(nccl, one, **{"from": ctypes.addressof(host)}) == INVALID_ARGUMENT
    assert reduce(nccl, one, to=one.memory + 4096 - 8) == INVALID_ARGUMENT
    assert reduce(nccl, one, dtype=10) == INVALID_ARGUMENT
    assert reduce(nccl, one, operation=5) == INVALID_ARGUMENT  # not made
    assert reduce(nccl, one, communicator=4096) == INVALID_ARGUMENT
    assert nccl("ncclSend", one.memory, 1, FLOAT, 2, one.communicator, one.stream) == INVALID_ARGUMENT
    assert nccl("ncclGroupEnd") == INVALID_USAGE
    assert nccl("ncclGroupStart") == 0
    assert reduce(nccl, one, dtype=-1) == INVALID_ARGUMENT
    assert nccl("ncclGroupEnd") == INVALID_ARGUMENT
    members[1].use()
    assert nccl("ncclAllReduce", one.memory, one.memory, 1, FLOAT, SUM, one.communicator, one.stream) == INVALID_USAGE
    assert reduce(nccl, one) == IN_PROGRESS
    assert reduce(nccl, members[1]) == IN_PROGRESS  # the refused calls were not submitted
    assert settled(nccl, members) == [0, 0]
    identifier, made = UniqueId(), ctypes.c_uint64()
    for wrong in ({"magic": 1}, {"size": 8}, {"version": 21300}):
        given = (ctypes.byref(made), 1, identifier, 0, ctypes.byref(config(**wrong)))
        assert nccl("ncclCommInitRankConfig", *given) == INVALID_ARGUMENT
    given = (ctypes.byref(made), 1, identifier, 0, ctypes.byref(config(blocking=1)))
    assert nccl("ncclCommInitRankConfig", *given) == INVALID_USAGE
    leave(nccl, members)


def test_two_ranks_on_a_device_are_refused(nccl: Call, context: int) -> None:
    members = joined(nccl, (context, context))
    assert settled(nccl, members) == [INVALID_USAGE, INVALID_USAGE]
    leave(nccl, members, "ncclCommAbort")


def test_different_calls_are_an_error_and_abort_ends_them(nccl: Call, members: list[Member]) -> None:
    assert reduce(nccl, members[0]) == IN_PROGRESS
    assert reduce(nccl, members[1], count=2) == IN_PROGRESS
    deadline = time.monotonic() + 30
    while [state(nccl, one) for one in members] != [INTERNAL_ERROR, INTERNAL_ERROR]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    for one in members:
        one.use()
        assert api.status("cuStreamQuery", one.stream) == api.NOT_READY
    leave(nccl, members, "ncclCommAbort")
    for one in members:
        one.use()
        api.synchronize(one.stream)


def test_abort_ends_a_collective_that_waits(nccl: Call, members: list[Member]) -> None:
    assert reduce(nccl, members[0]) == IN_PROGRESS
    assert settled(nccl, members) == [0, 0]
    assert api.status("cuStreamQuery", members[0].stream) == api.NOT_READY
    leave(nccl, members[:1], "ncclCommAbort")
    api.synchronize(members[0].stream)
    leave(nccl, members[1:], "ncclCommAbort")
