"""torch.bp: device count, current device and properties; the methods that PyTorch generates; torch.accelerator."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator

import pytest
import torch

from torch_backplane import _C

DEVICES = 4  # set in conftest.py


@pytest.fixture(autouse=True)
def _first_device() -> Iterator[None]:
    torch.bp.set_device(0)
    yield
    torch.bp.set_device(0)


# --- devices ---------------------------------------------------------------------------------------------------------


def test_device_count() -> None:
    assert torch.bp.is_available()
    assert torch.bp.device_count() == DEVICES
    assert torch.bp._is_compiled()
    assert not torch.bp._is_in_bad_fork()


def test_initialization() -> None:
    torch.bp.init()
    assert torch.bp.is_initialized()
    assert torch.bp._initialized
    torch.bp.init()
    assert len(torch.bp.default_generators) == DEVICES


@pytest.mark.parametrize("device", [2, "bp:2", torch.device("bp:2"), torch.device("bp", 2)], ids=str)
def test_set_device(device: torch.device | str | int) -> None:
    torch.bp.set_device(device)
    assert torch.bp.current_device() == 2
    assert torch.empty(1, device="bp").device == torch.device("bp:2")


def test_set_device_without_an_index() -> None:
    torch.bp.set_device(1)
    torch.bp.set_device(-1)
    assert torch.bp.current_device() == 1
    with torch.bp.device(-1):
        assert torch.bp.current_device() == 1
    with torch.bp.device(None), torch.bp.device("bp"):
        assert torch.bp.current_device() == 1
    with pytest.raises(ValueError, match="specified index or an integer, but got: None"):
        torch.bp.set_device(None)
    with pytest.raises(ValueError, match="specified index or an integer, but got: bp"):
        torch.bp.set_device("bp")


@pytest.mark.parametrize("device", ["cpu", "cuda:0", torch.device("meta")], ids=str)
def test_devices_of_another_type_are_refused(device: torch.device | str) -> None:
    for function in (torch.bp.set_device, torch.bp.device, torch.bp.get_device_name, torch.bp.current_stream):
        with pytest.raises(ValueError, match="Expected a bp device, but got"):
            function(device)


def test_arguments_that_are_not_devices_are_refused() -> None:
    for bad in (1.5, [0], b"bp"):
        with pytest.raises(TypeError, match=r"device must be a torch.device, a string, an index or None"):
            torch.bp.set_device(bad)


@pytest.mark.parametrize("index", [DEVICES, 99, 1000])
def test_a_device_index_out_of_range(index: int) -> None:
    with pytest.raises(RuntimeError, match=f"invalid device ordinal: bp:{index}"):
        torch.bp.set_device(index)
    with pytest.raises(RuntimeError, match=f"invalid device ordinal: bp:{index}"), torch.bp.device(index):
        pass
    with pytest.raises(RuntimeError, match=f"invalid device ordinal: bp:{index}"):
        torch.bp.synchronize(index)
    with pytest.raises(AssertionError, match=f"Invalid device id: {index}; the number of bp devices is 4"):
        torch.bp.get_device_properties(index)
    assert torch.bp.current_device() == 0


def test_a_tensor_on_a_missing_device() -> None:
    with pytest.raises(RuntimeError, match=rf"bp:9, but there are {DEVICES} devices \(bp:0 to bp:3\)"):
        torch.empty(1, device="bp:9")


def test_device_contexts_nest_and_restore() -> None:
    with torch.bp.device(1):
        with torch.bp.device("bp:2"):
            assert torch.bp.current_device() == 2
        assert torch.bp.current_device() == 1
        with torch.bp.device(torch.bp.device(3)):
            assert torch.bp.current_device() == 3
        with pytest.raises(ZeroDivisionError), torch.bp.device(3):
            raise ZeroDivisionError
        assert torch.bp.current_device() == 1
    assert torch.bp.current_device() == 0


def test_device_of() -> None:
    tensor = torch.empty(1, device="bp:3")
    for there in (tensor, tensor.untyped_storage()):
        with torch.bp.device_of(there):
            assert torch.bp.current_device() == 3
    with torch.bp.device_of(torch.empty(1)):
        assert torch.bp.current_device() == 0
    assert torch.bp.current_device() == 0


def test_each_thread_has_its_own_current_device() -> None:
    barrier = threading.Barrier(2)
    seen: dict[int, list[int]] = {}

    def work(index: int) -> None:
        torch.bp.set_device(index)
        barrier.wait(timeout=60)
        seen[index] = [torch.bp.current_device(), torch.empty(1, device="bp").get_device()]

    threads = [threading.Thread(target=work, args=(index,)) for index in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {1: [1, 1], 2: [2, 2]}
    assert torch.bp.current_device() == 0


# --- properties ------------------------------------------------------------------------------------------------------


def test_properties() -> None:
    properties = torch.bp.get_device_properties("bp:1")
    assert properties.driver in ("cuda", "host", "opencl")
    assert properties.name == torch.bp.get_device_name(1)
    assert torch.bp.get_device_properties(0).name == torch.bp.get_device_name()
    assert properties.total_memory == torch.bp.mem_get_info(1)[1] > 0
    assert (properties.major, properties.minor) == torch.bp.get_device_capability(torch.device("bp:1"))
    assert properties.multi_processor_count == properties.compute_units > 0
    assert isinstance(properties.host_accessible, bool)
    assert torch.float64 in properties.dtypes
    assert properties.name in repr(properties)
    with pytest.raises(AttributeError):
        properties.uuid  # noqa: B018 - drivers do not report it


def test_device_memory_used() -> None:
    before = torch.bp.device_memory_used(2)
    tensor = torch.empty(64 << 20, dtype=torch.uint8, device="bp:2")
    assert torch.bp.device_memory_used(2) - before >= tensor.nbytes


def test_peer_access() -> None:
    reachable = torch.bp.get_device_properties(0).driver in ("cuda", "host")
    assert torch.bp.can_device_access_peer(0, 1) == reachable
    assert torch.bp.can_device_access_peer("bp:0", torch.device("bp:1")) == reachable
    with pytest.raises(AssertionError, match="Invalid peer device id: 9"):
        torch.bp.can_device_access_peer(0, 9)
    with pytest.raises(AssertionError, match="Invalid device id: -1"):
        torch.bp.can_device_access_peer(-1, 0)
    with pytest.raises(ValueError, match="specified index or an integer"):
        torch.bp.can_device_access_peer(0, None)


def test_dtypes() -> None:
    assert torch.bp.is_bf16_supported()
    assert torch.bp.is_bf16_supported(including_emulation=False)
    assert not torch.bp.is_tf32_supported()
    assert torch.bp.get_amp_supported_dtype() == [torch.float16, torch.bfloat16]


def test_sleep_counts_1_ghz_cycles_in_stream_order() -> None:
    start, end = torch.bp.Event(enable_timing=True), torch.bp.Event(enable_timing=True)
    torch.bp._sleep(60_000_000)  # a sleep that counted from its submission would end during this one
    start.record()
    torch.bp._sleep(20_000_000)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 20


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match=r"module 'torch.bp' has no attribute 'nccl'"):
        torch.bp.nccl  # noqa: B018


def test_submodules_are_not_loaded_twice() -> None:
    for name in ("memory", "random", "streams"):
        assert importlib.import_module(f"torch.bp.{name}") is getattr(torch.bp, name)


# --- methods that PyTorch generates ----------------------------------------------------------------------------------


def test_tensor_methods() -> None:
    tensor = torch.arange(3.0)
    assert not tensor.is_bp
    assert tensor.bp().is_bp
    assert tensor.bp().tolist() == [0, 1, 2]
    for device in (2, "bp:2", torch.device("bp:2")):
        assert tensor.bp(device).device == torch.device("bp:2")
    there = tensor.bp()
    assert there.bp() is there
    with torch.bp.device(1):
        assert tensor.bp().device == torch.device("bp:1")
    assert tensor.pin_memory().bp(non_blocking=True).tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="Invalid device, must be bp device"):
        tensor.bp("cpu")


def test_module_methods() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    assert module.bp(1) is module
    assert {tensor.device for tensor in module.state_dict().values()} == {torch.device("bp:1")}
    assert module(torch.ones(3, 2, device="bp:1")).is_bp


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_storage_methods() -> None:
    untyped = torch.arange(4, dtype=torch.uint8).untyped_storage()
    assert not untyped.is_bp
    there = untyped.bp(1)
    assert there.is_bp
    assert there.device == torch.device("bp:1")
    assert there.bp(1) is there
    assert list(there.cpu()) == [0, 1, 2, 3]
    typed = torch.arange(3.0)._typed_storage()
    assert not typed.is_bp
    assert typed.bp().is_bp
    assert typed.bp().dtype == torch.float32


def test_packed_sequence_methods() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    assert not packed.is_bp
    assert packed.bp().is_bp
    assert packed.bp().data.device == torch.device("bp:0")
    assert packed.bp(device="bp:2").data.device == torch.device("bp:2")


# --- torch.accelerator -----------------------------------------------------------------------------------------------


def test_torch_accelerator_finds_bp() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("bp")
    assert torch.accelerator.current_accelerator(check_available=True) == torch.device("bp")
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == DEVICES
    assert torch.get_device_module() is torch.bp
    assert torch.get_device_module("bp:1") is torch.bp


def use_current_device() -> None:
    torch.accelerator.set_device_index(2)
    assert torch.accelerator.current_device_index() == torch.bp.current_device() == 2
    with torch.accelerator.device_index(1):
        assert torch.bp.current_device() == 1
        with torch.accelerator.device_index(None):
            assert torch.bp.current_device() == 1
    assert torch.accelerator.current_device_index() == 2
    with pytest.raises(RuntimeError, match="invalid device ordinal: bp:9"):
        torch.accelerator.set_device_index(9)


@pytest.mark.filterwarnings("ignore:Use `.*` instead:FutureWarning")
def use_deprecated_names() -> None:
    torch.accelerator.set_device_idx(1)
    assert torch.accelerator.current_device_idx() == 1


def use_capability() -> None:
    capability = torch.accelerator.get_device_capability("bp:0")
    assert capability["supported_dtypes"] >= {torch.float32, torch.bfloat16, torch.int64, torch.complex64}


def use_streams() -> None:
    stream = torch.Stream(device="bp:1")
    torch.accelerator.set_stream(stream)
    assert torch.accelerator.current_stream() == torch.accelerator.current_stream("bp:1") == stream
    assert torch.bp.current_stream() == stream
    torch.accelerator.set_stream(torch.bp.default_stream(1))
    torch.bp._sleep(20_000_000)
    torch.accelerator.synchronize()
    torch.accelerator.synchronize("bp:2")
    assert torch.bp.current_stream().query()


def use_memory() -> None:
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.reset_accumulated_memory_stats()
    before = torch.accelerator.memory_allocated()
    tensor = torch.empty(4 << 20, dtype=torch.uint8, device="bp")
    assert torch.accelerator.memory_allocated() - before == tensor.nbytes
    assert torch.accelerator.max_memory_allocated() >= before + tensor.nbytes
    assert torch.accelerator.memory_reserved() >= torch.accelerator.memory_allocated()
    assert torch.accelerator.max_memory_reserved() >= torch.accelerator.memory_reserved()
    assert torch.accelerator.memory_stats()["allocated_bytes.all.allocated"] >= tensor.nbytes
    free, total = torch.accelerator.get_memory_info()
    assert 0 < free < total == torch.bp.get_device_properties().total_memory


def use_host_memory() -> None:
    torch.empty(1 << 20).pin_memory()
    torch.accelerator.empty_host_cache()


def use_graphs() -> None:
    """See opencl/test_graphs.py and test_graphs_on_host.py."""
    x = torch.zeros(3, device="bp")
    graph = torch.accelerator.Graph()
    with torch.Stream(x.device), graph:
        x += 1
    assert x.tolist() == [0, 0, 0]
    graph.replay()
    assert x.tolist() == [1, 1, 1]


USES = {
    use_graphs: {"Graph"},
    use_current_device: {"current_device_index", "set_device_index", "device_index"},
    use_deprecated_names: {"current_device_idx", "set_device_idx"},
    use_capability: {"get_device_capability"},
    use_streams: {"current_stream", "set_stream", "synchronize"},
    use_memory: {
        "empty_cache",
        "get_memory_info",
        "max_memory_allocated",
        "max_memory_reserved",
        "memory_allocated",
        "memory_reserved",
        "memory_stats",
        "reset_accumulated_memory_stats",
        "reset_peak_memory_stats",
    },
    use_host_memory: {"empty_host_cache"},
    test_torch_accelerator_finds_bp: {"current_accelerator", "device_count", "is_available"},
}
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torch_accelerator(use) -> None:
    missing = {name for name in USES[use] if not hasattr(torch.accelerator, name)}
    if missing:
        pytest.skip(f"this torch.accelerator has no {', '.join(sorted(missing))}")
    use()


def test_every_name_of_torch_accelerator_is_used() -> None:
    assert set(torch.accelerator.__all__) <= set().union(*USES.values())


# --- functions that PyTorch's generic code calls ---------------------------------------------------------------------


def test_get_device_index() -> None:
    assert torch.bp._utils._get_device_index("bp:2") == 2
    assert torch.bp._utils._get_device_index(None, optional=True) == 0
    assert torch.bp._utils._get_device_index("cpu", allow_cpu=True) == -1
    with pytest.raises(ValueError, match="Expected a bp or cpu device, but got: meta"):
        torch.bp._utils._get_device_index("meta", allow_cpu=True)


def test_loading_to_a_missing_device(tmp_path) -> None:
    path = tmp_path / "tensor.pt"
    torch.save(torch.ones(2, device="bp:1"), path)
    assert torch.load(path).device == torch.device("bp:1")
    assert torch.load(path, map_location="bp:3").device == torch.device("bp:3")
    with pytest.raises(RuntimeError, match=r"device 9 but torch\.bp\.device_count\(\) is 4"):
        torch.load(path, map_location="bp:9")


def test_checkpointing_restores_the_generator_of_the_device() -> None:
    drop = torch.nn.Dropout(0.5)
    inputs = torch.ones(256, device="bp:1", requires_grad=True)
    outputs = torch.utils.checkpoint.checkpoint(drop, inputs, use_reentrant=True)
    outputs.sum().backward()
    assert torch.equal(inputs.grad, outputs)  # both runs draw the same mask


def test_pytorch_tests_instantiate_for_bp() -> None:
    from torch.testing._internal.common_device_type import PrivateUse1TestBase

    PrivateUse1TestBase.setUpClass()
    assert PrivateUse1TestBase.device_type == "bp"
    assert PrivateUse1TestBase.primary_device == "bp:0"
    assert PrivateUse1TestBase.get_all_devices() == ["bp:0", "bp:1", "bp:2", "bp:3"]


def test_runtime_errors_name_an_index_beyond_8_bits() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal: bp:70000"):
        _C.device_properties(70000)
