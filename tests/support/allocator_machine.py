"""Runs random programs on the allocator and on its model, and compares all blocks after every step.

    TORCH_BACKPLANE_HOST_MEMORY=80MiB python tests/support/allocator_machine.py CONFIGURATION [EXAMPLES [SEED]]

test_allocator_model.py runs this script in a separate process for each configuration: the device must be small, and a
crash must fail only one test.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from allocator_model import KIB, MIB, AllocatorModel, Block, ModelOutOfMemory, Settings
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import torch_backplane  # noqa: F401
from torch_backplane import _C
from torch_backplane.accelerator import memory

STEPS_PER_EXAMPLE = 100


@dataclass
class Configuration:
    option_string: str
    settings: Settings = field(default_factory=Settings)
    fraction: float = 1.0


# Default values, set before each example: PyTorch's parser keeps the options that a string does not mention.
DEFAULTS = (
    "max_split_size_mb:1000000000,max_non_split_rounding_mb:20,large_segment_size_mb:20,expandable_segments:False,"
    "roundup_power2_divisions:[1:0,>:0]"
)
CONFIGURATIONS = {
    "default": Configuration(""),
    "fraction": Configuration("", fraction=0.4),
    "garbage_collection": Configuration(
        "garbage_collection_threshold:0.5", Settings(garbage_collection_threshold=0.5), fraction=0.9
    ),
    "max_split_size": Configuration(
        "max_split_size_mb:24,max_non_split_rounding_mb:21",
        Settings(max_split_size=24 * MIB, max_non_split_rounding=21 * MIB),
    ),
    "roundup": Configuration("roundup_power2_divisions:4", Settings(roundup_divisions=4)),
    "large_segment": Configuration("large_segment_size_mb:32", Settings(large_segment=32 * MIB)),
    "expandable": Configuration("expandable_segments:True", Settings(expandable=True)),
    "expandable_fraction": Configuration(
        "expandable_segments:True,large_segment_size_mb:22",
        Settings(expandable=True, large_segment=22 * MIB),
        fraction=0.5,
    ),
}

sizes = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, MIB),
    st.integers(MIB, 12 * MIB),
    st.sampled_from([1, 512, 513, MIB - 1, MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB, 20 * MIB, 24 * MIB]),
)
common_sizes = st.sampled_from([600, 5000, 200 * KIB, MIB, 3 * MIB, 5 * MIB])
large_sizes = st.integers(12 * MIB, 50 * MIB)
streams = st.integers(0, 3)
choices = st.integers(0, 1 << 20)


class AllocatorMachine(RuleBasedStateMachine):
    configuration: Configuration
    stream_ids: list[int]
    steps = 0
    programs = 0  # checksum of the allocator's statistics: shows whether another seed ran other programs
    reached = dict.fromkeys(("ooms", "retries", "waits"), 0)  # rare code paths, which the tests require to be reached

    @initialize()
    def start(self) -> None:
        configuration = self.configuration
        memory._set_allocator_settings(DEFAULTS)
        if configuration.option_string:
            memory._set_allocator_settings(configuration.option_string)
        memory.empty_cache()
        memory.reset_accumulated_memory_stats()
        memory.set_per_process_memory_fraction(configuration.fraction)
        self.model = AllocatorModel(memory.mem_get_info()[1], Settings(**vars(configuration.settings)))
        self.model.allowed = int(configuration.fraction * self.model.capacity)
        self.pairs: list[tuple[Block, int]] = []
        self.gates: dict[int, Any] = {}
        self.pools: list[tuple[int, int]] = []

    # --- steps ---------------------------------------------------------------------------------------------------

    @rule(size=st.one_of(sizes, common_sizes, large_sizes), stream=streams)
    def allocate(self, size: int, stream: int) -> None:
        stream_id = self.stream_ids[stream]
        try:
            block = self.model.allocate(size, stream_id)
        except ModelOutOfMemory:
            block = None
        try:
            address = self.run_with_gates(lambda: _C._memory_allocate(size, 0, stream_id))
        except torch.OutOfMemoryError:
            assert block is None, f"out of memory for {size} bytes, which the model places in {block}"
        else:
            assert block is not None, f"the model is out of memory for {size} bytes, allocated at {address:#x}"
            if block.segment.base is None:
                block.segment.base = address - block.offset
            assert address == block.address
            self.pairs.append((block, address))
        self.compare()

    @precondition(lambda self: self.pairs)
    @rule(choice=choices)
    def free(self, choice: int) -> None:
        block, address = self.pairs.pop(choice % len(self.pairs))
        self.model.free(block)
        _C._memory_free(address)
        self.compare()

    @rule(size=common_sizes, stream=streams, holes=st.integers(2, 3))
    def allocate_and_leave_holes(self, size: int, stream: int, holes: int) -> None:
        """Frees every second block of several equal ones, then allocates one of the holes."""
        first = len(self.pairs)
        for _ in range(2 * holes):
            self.allocate(size, stream)
        for index in reversed(range(first, len(self.pairs), 2)):
            self.free(index)
        self.allocate(size, stream)

    @precondition(lambda self: self.pairs)
    @rule(choice=choices, count=st.integers(2, 6))
    def free_several(self, choice: int, count: int) -> None:
        for _ in range(min(count, len(self.pairs))):
            self.free(choice)

    @precondition(lambda self: self.pairs)
    @rule(choice=choices, stream=streams)
    def free_while_in_use(self, choice: int, stream: int) -> None:
        self.hold_stream(stream)
        self.record_stream(choice, stream)
        self.free(choice)

    @precondition(lambda self: self.pairs)
    @rule(choice=choices, stream=streams)
    def record_stream(self, choice: int, stream: int) -> None:
        block, address = self.pairs[choice % len(self.pairs)]
        self.model.record_stream(block, self.stream_ids[stream])
        _C._memory_record_stream(address, 0, self.stream_ids[stream])
        self.compare()

    @precondition(lambda self: len(self.gates) < 3)
    @rule(stream=streams)
    def hold_stream(self, stream: int) -> None:
        stream_id = self.stream_ids[stream]
        if stream_id not in self.gates:
            self.gates[stream_id] = _C._StreamGate(0, stream_id)
            self.model.hold(stream_id)

    @precondition(lambda self: self.gates)
    @rule(choice=choices)
    def open_stream(self, choice: int) -> None:
        stream_id = sorted(self.gates)[choice % len(self.gates)]
        self.gates.pop(stream_id).open()
        self.model.open(stream_id)
        self.compare()

    @rule(choice=st.integers(0, 3))
    def empty_cache(self, choice: int) -> None:
        if choice == 0:
            self.model.empty_cache()
            self.run_with_gates(memory.empty_cache)
        self.compare()

    @precondition(lambda self: len(self.pools) < 2)
    @rule(use_on_oom=st.booleans(), no_split=st.booleans())
    def create_pool(self, use_on_oom: bool, no_split: bool) -> None:
        pool_id = _C._memory_new_pool_id(True)
        _C._memory_retain_pool(0, pool_id)
        _C._memory_set_pool_options(0, pool_id, use_on_oom, no_split)
        self.model.create_pool(pool_id, use_on_oom, no_split)
        self.pools.append(pool_id)

    @precondition(lambda self: self.pools)
    @rule(choice=choices)
    def begin_or_end_pool(self, choice: int) -> None:
        if self.model.active_pools:
            pool_id = self.model.active_pools[-1]
            self.model.end_allocate_to_pool()
            _C._memory_end_allocate_to_pool(0, pool_id)
            _C._memory_release_pool(0, pool_id)
        else:
            pool_id = self.pools[choice % len(self.pools)]
            self.model.begin_allocate_to_pool(pool_id)
            _C._memory_begin_allocate_current_thread_to_pool(0, pool_id)

    @precondition(lambda self: self.pools and not self.model.active_pools)
    @rule(choice=choices)
    def delete_pool(self, choice: int) -> None:
        pool_id = self.pools.pop(choice % len(self.pools))
        self.model.release_pool(pool_id)
        self.model.empty_cache(pool_id)
        _C._memory_release_pool(0, pool_id)
        self.run_with_gates(lambda: _C._memory_empty_cache(pool_id))
        self.compare()

    # --- helpers -------------------------------------------------------------------------------------------------

    def run_with_gates(self, call: Callable[[], Any]) -> Any:
        """Calls the allocator. Opens the held streams that the model expects it to wait for, once it waits."""
        waited_for = self.model.waited_for
        if not waited_for:
            return call()
        self.reached["waits"] += 1
        synchronized = memory.memory_stats()["num_sync_all_streams"]

        def open_gates() -> None:
            while memory.memory_stats()["num_sync_all_streams"] == synchronized:
                time.sleep(0.0005)
            for stream_id in waited_for:
                self.gates.pop(stream_id).open()

        opener = threading.Thread(target=open_gates)
        opener.start()
        try:
            return call()
        finally:
            opener.join()

    def compare(self) -> None:
        type(self).steps += 1
        real = [
            {
                **{key: segment[key] for key in ("address", "total_size", "stream", "segment_type")},
                **{key: segment[key] for key in ("segment_pool_id", "is_expandable")},
                "blocks": [(b["address"], b["size"], b["requested_size"], b["state"]) for b in segment["blocks"]],
            }
            for segment in memory.memory_snapshot(include_traces=False)
        ]
        model = self.model.snapshot()
        assert real == model, f"\nreal:  {real}\nmodel: {model}"
        statistics = memory.memory_stats()
        expected = self.model.statistics()
        type(self).programs = zlib.crc32(repr(expected).encode(), type(self).programs)
        assert {key: statistics[key] for key in expected} == expected

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        self.reached["ooms"] += self.model.ooms
        self.reached["retries"] += self.model.retries
        for gate in self.gates.values():
            gate.open()
        for pool_id in self.model.active_pools:
            _C._memory_end_allocate_to_pool(0, pool_id)
            _C._memory_release_pool(0, pool_id)
        for pool_id in self.pools:
            _C._memory_release_pool(0, pool_id)
        for _, address in self.pairs:
            _C._memory_free(address)
        memory.empty_cache()
        assert memory.memory_reserved() == 0


def main(name: str, examples: int = 20, number: int = 0) -> None:
    torch.empty(1, device="bp")  # discovers the devices
    AllocatorMachine.configuration = CONFIGURATIONS[name]
    AllocatorMachine.stream_ids = [0, *(_C.pool_stream(0, 0)[0] for _ in range(3))]
    run_state_machine_as_test(
        seed(zlib.crc32(name.encode()) + number)(AllocatorMachine),  # the same programs in every run
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS_PER_EXAMPLE,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    done = {"steps": AllocatorMachine.steps, "programs": AllocatorMachine.programs}
    print(json.dumps({"configuration": name, **done, **AllocatorMachine.reached}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
