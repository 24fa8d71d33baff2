"""Saving, loading, copying, pickling and sharing bp tensors and modules."""

from __future__ import annotations

import copy
import gc
import io
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn


def saved(value: Any, **options: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("zip_file", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16],
    ids=str,
)
def test_loading_restores_device_and_dtype(dtype: torch.dtype, weights_only: bool, zip_file: bool) -> None:
    if not zip_file and dtype in (torch.float8_e4m3fn, torch.uint16):
        pytest.skip("PyTorch's legacy format has no storage type for this dtype on any device")
    x = torch.arange(6, dtype=torch.float32).to(dtype).to("bp:1")
    buffer = saved(x, _use_new_zipfile_serialization=zip_file)
    loaded = torch.load(buffer, weights_only=weights_only)
    assert (loaded.device, loaded.dtype) == (torch.device("bp:1"), dtype)
    assert torch.equal(loaded.cpu().view(torch.uint8), x.cpu().view(torch.uint8))


LOCATIONS: dict[str, Any] = {
    "string": "bp:2",
    "device": torch.device("bp:2"),
    "dictionary": {"bp:0": "bp:2", "cpu": "bp:2"},
    "function": lambda storage, location: storage.bp(2),
}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("source", ["bp:0", "cpu"])
@pytest.mark.parametrize("location", LOCATIONS)
def test_map_location_to_bp(location: str, source: str, weights_only: bool) -> None:
    buffer = saved({"x": torch.arange(3.0, device=source)})
    loaded = torch.load(buffer, map_location=LOCATIONS[location], weights_only=weights_only)["x"]
    assert loaded.device == torch.device("bp:2")
    assert loaded.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "location",
    ["cpu", torch.device("cpu"), {"bp:0": "cpu"}, lambda storage, location: storage],
    ids=["string", "device", "dictionary", "function"],
)
def test_map_location_to_cpu(location: Any) -> None:
    loaded = torch.load(saved(torch.arange(3.0, device="bp:0")), map_location=location, weights_only=True)
    assert loaded.device == torch.device("cpu")
    assert loaded.tolist() == [0, 1, 2]


def test_map_location_without_an_index_means_the_current_device() -> None:
    buffer = saved(torch.arange(3.0, device="bp:3"))
    with torch.accelerator.device_index(1):
        assert torch.load(buffer, map_location="bp").device == torch.device("bp:1")


def test_map_location_to_a_missing_device() -> None:
    with pytest.raises(RuntimeError, match=r"deserialize object on BP device 9 but torch\.bp\.device_count\(\) is 4"):
        torch.load(saved(torch.ones(2, device="bp")), map_location="bp:9")


def test_loading_a_tensor_of_a_missing_device(run_python: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    torch.save(torch.ones(2, device="bp:3"), tmp_path / "x.pt")
    result = run_python(
        f"import torch\ntry: torch.load({str(tmp_path / 'x.pt')!r})\nexcept RuntimeError as error: print(error)\n"
        f"print(torch.load({str(tmp_path / 'x.pt')!r}, map_location='bp:0').device)",
        TORCH_BACKPLANE_DRIVERS="host",
        TORCH_BACKPLANE_VISIBLE_DEVICES=None,
        TORCH_BACKPLANE_HOST_DEVICES="2",
    )
    assert result.returncode == 0, result.stderr
    message, device = result.stdout.strip().rsplit("\n", 1)
    assert "BP device 3" in message
    assert "map_location" in message
    assert device == "bp:0"


def test_storage_sharing_is_kept() -> None:
    base = torch.arange(6.0, device="bp")
    parameter = nn.Parameter(torch.ones(2, device="bp"))
    loaded = torch.load(
        saved({"base": base, "view": base[2:].view(2, 2).t(), "tied": [parameter, parameter]}), weights_only=True
    )
    loaded["base"][2] = 100
    assert loaded["view"].tolist() == [[100, 4], [3, 5]]
    assert loaded["view"].stride() == (1, 2)
    assert loaded["tied"][0] is loaded["tied"][1]
    assert isinstance(loaded["tied"][0], nn.Parameter)
    mapped = torch.load(saved([base, base[1:]]), map_location="cpu")
    assert mapped[0].untyped_storage().data_ptr() == mapped[1].untyped_storage().data_ptr()


def test_a_small_view_saves_its_whole_storage_once() -> None:
    base = torch.zeros(10_000, device="bp")
    one, two = saved([base[:2]]), saved([base[:2], base[2:4]])
    assert abs(len(one.getvalue()) - len(two.getvalue())) < 500
    assert len(saved(base[:2].clone()).getvalue()) < 3000


def test_conjugate_and_negative_bits_and_gradients() -> None:
    x = torch.tensor([1 + 2j], device="bp")
    loaded = torch.load(saved([x.conj(), x.clone().conj().imag, nn.Parameter(x.real.clone()), x.clone()]))
    assert [t.cpu().item() for t in loaded] == [1 - 2j, -2, 1, 1 + 2j]
    assert loaded[0].is_conj()
    assert loaded[2].requires_grad


def test_mmap_and_files(tmp_path: pathlib.Path) -> None:
    state = nn.Linear(3, 2).to("bp").state_dict()
    torch.save(state, tmp_path / "model.pt")
    for options in ({}, {"map_location": "cpu", "mmap": True}, {"map_location": "bp:1", "mmap": True}):
        loaded = torch.load(tmp_path / "model.pt", **options)
        assert torch.equal(loaded["weight"].cpu(), state["weight"].cpu())


def test_loading_on_meta() -> None:
    assert torch.load(saved(torch.ones(2, device="bp")), map_location="meta").device.type == "meta"


def test_state_dicts_cross_devices() -> None:
    model, other = nn.Linear(3, 2).to("bp"), nn.Linear(3, 2)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.weight, model.weight.cpu())
    other.weight.data.zero_()
    model.load_state_dict(other.state_dict())
    assert model.weight.device.type == "bp"
    assert not model.weight.any()
    meta = nn.Linear(3, 2, device="meta")
    meta.load_state_dict(model.state_dict(), assign=True)
    assert meta.weight.device.type == "bp"
    empty = nn.Linear(3, 2, device="meta").to_empty(device="bp")
    assert empty.weight.device.type == "bp"


def test_state_dict_hooks() -> None:
    model = nn.Sequential(nn.Linear(2, 2)).to("bp")
    seen: list[str] = []
    model.register_state_dict_post_hook(lambda module, state, prefix, meta: seen.append(state["0.weight"].device.type))
    model.register_state_dict_pre_hook(lambda module, prefix, keep: seen.append("pre"))
    model.register_load_state_dict_pre_hook(lambda module, state, *rest: seen.append(f"load {len(state)}"))
    model.register_load_state_dict_post_hook(lambda module, keys: seen.append("loaded"))
    model.load_state_dict(model.state_dict())
    assert seen == ["pre", "bp", "load 2", "loaded"]


@pytest.mark.parametrize("device", ["bp:0", "bp:1"])
def test_deepcopy(device: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(device)
    model(torch.randn(3, 2, device=device)).sum().backward()
    twin = copy.deepcopy(model)
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert mine.device == torch.device(device)
        assert mine.data_ptr() != theirs.data_ptr()
        assert torch.equal(mine, theirs)
    base = torch.arange(4.0, device=device)
    copied, view = copy.deepcopy((base, base[1:]))
    copied[1] = 9
    assert view[0].item() == 9
    assert base[1].item() == 1
    assert copy.copy(base).data_ptr() == base.data_ptr()
    assert copy.deepcopy(torch.tensor([1j], device=device).conj()).item() == -1j


def test_pickle() -> None:
    x = torch.arange(4.0, device="bp:1").view(2, 2).t()
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        loaded = pickle.loads(pickle.dumps(x, protocol))
        assert (loaded.device, loaded.stride()) == (torch.device("bp:1"), (1, 2))
        assert torch.equal(loaded, x)
    model = pickle.loads(pickle.dumps(nn.Linear(2, 2).to("bp")))
    assert model.weight.device.type == "bp"
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2, device="bp")).sum().backward()
    optimizer.step()
    assert torch.load(saved(optimizer.state_dict()), weights_only=True)["state"][0]["exp_avg"].device.type == "bp"
    assert pickle.loads(pickle.dumps(torch.device("bp:1"))) == torch.device("bp:1")


def test_generators_and_devices_inside_checkpoints() -> None:
    state = {
        "rng": torch.bp.get_rng_state(),
        "device": torch.device("bp:1"),
        "size": torch.ones(2, 3, device="bp").shape,
    }
    loaded = torch.load(saved(state), weights_only=True)
    assert torch.equal(loaded["rng"], state["rng"])
    assert loaded["device"] == torch.device("bp:1")


class Labelled(Tensor):
    """A tensor subclass, for a tensor with a Python attribute."""


def test_subclasses_and_python_attributes() -> None:
    x = torch.ones(2, device="bp").as_subclass(Labelled)
    x.label = "one"  # type: ignore[attr-defined]
    loaded = torch.load(saved(x), weights_only=False)
    assert type(loaded) is Labelled
    assert loaded.label == "one"
    assert loaded.device.type == "bp"


def test_share_memory_ignores_bp_tensors() -> None:
    """As it does CUDA tensors. Sending them to another process: test_processes.py."""
    x = torch.ones(2, device="bp")
    assert x.share_memory_() is x
    assert x.untyped_storage().share_memory_().device.type == "bp"
    nn.Linear(2, 2).to("bp").share_memory()
    for share in (x.untyped_storage()._share_fd_cpu_, x.untyped_storage()._share_filename_cpu_):
        with pytest.raises(NotImplementedError, match="bp memory belongs to the process that allocated it"):
            share()
    assert torch.ones(2).share_memory_().is_shared()


def error_of_loading(path: pathlib.Path, location: str) -> tuple[type[Exception], str]:
    try:
        torch.load(path, map_location=location)
    except Exception as error:
        return type(error), str(error)
    raise AssertionError(f"loading on {location} raises no error")


@pytest.mark.parametrize("source", ["bp:0", "cpu"])
@pytest.mark.parametrize("zip_file", [True, False], ids=["zip", "legacy"])
def test_truncated_file_gives_the_error_of_the_cpu(zip_file: bool, source: str, tmp_path: pathlib.Path) -> None:
    state = {name: torch.randn(64, 64, device=source) for name in ("first", "second", "third")}
    path = tmp_path / "model.pt"
    torch.save(state, path, _use_new_zipfile_serialization=zip_file)
    data = path.read_bytes()
    del state
    gc.collect()
    before = torch.bp.memory_allocated(0)
    for part in (0, 0.01, 0.3, 0.6, 0.95, 1):  # 1: without its last byte
        path.write_bytes(data[: min(int(part * len(data)), len(data) - 1)])
        assert error_of_loading(path, "bp:0") == error_of_loading(path, "cpu")
        gc.collect()
        assert torch.bp.memory_allocated(0) == before
        path.write_bytes(data)
        loaded = torch.load(path, map_location="bp:0")
        assert {one.device for one in loaded.values()} == {torch.device("bp:0")}
        del loaded
