"""Invalid environment variables, and use after a fork.

Each case runs in its own process: a fresh interpreter, or a fork for variables that are read at device discovery.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import driver_packages
import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# Prints the error of each entry point; device_count() and is_available() must not raise.
USE = """
import warnings, torch
for use in (torch.bp.init, torch.bp.current_device, lambda: torch.zeros(1, device="bp"), torch.bp.Stream):
    try:
        print("no error:", use())
    except (ValueError, RuntimeError) as error:
        print("ValueError" if isinstance(error, ValueError) else "RuntimeError", error)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(torch.bp.device_count(), torch.bp.is_available(), torch.accelerator.is_available())
    print("warned:", caught[0].message if caught else None)
print(torch.ones(2).sum().item())
"""


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("DRIVERS", "host,nosuch", "names 'nosuch'; installed drivers: "),
        ("DRIVERS", " , ", "names no driver; installed drivers: "),
        ("HOST_DEVICES", "four", "is not a whole number from 0 to 64"),
        ("HOST_DEVICES", "-1", "is not a whole number from 0 to 64"),
        ("HOST_DEVICES", "65", "is not a whole number from 0 to 64"),
        ("HOST_MEMORY", "2 gigs", "is not a size: write a number above 0 with a unit, such as 512MiB or 2GiB"),
        ("HOST_MEMORY", "0", "is not a size"),
        ("HOST_MEMORY", "", "is not a size"),
        ("DISCRETE", "yes", "is neither 0 nor 1"),
        ("VISIBLE_DEVICES", "host:0:1", "has the entry 'host:0:1'; write driver:index or driver"),
        ("VISIBLE_DEVICES", "host:64", "names host:64; driver 'host' has "),
    ],
)
def test_an_invalid_setting_is_named_at_every_use(run_forked: Run, name: str, value: str, message: str) -> None:
    name = f"TORCH_BACKPLANE_{name}"
    message = f"{name}={value!r} {message}"
    done = run_forked(USE, **{"TORCH_BACKPLANE_DRIVERS": "host", name: value})
    lines = done.stdout.splitlines()
    assert len(lines) == 7, done.stderr
    for line in lines[:4]:
        assert line.startswith(f"ValueError {message}"), line
    assert lines[4] == "0 False False"
    assert message in lines[5]
    assert lines[6] == "2.0"  # the rest of PyTorch works


def test_no_devices(run_forked: Run) -> None:
    done = run_forked(USE, TORCH_BACKPLANE_DRIVERS="host", TORCH_BACKPLANE_HOST_DEVICES="0")
    lines = done.stdout.splitlines()
    assert len(lines) == 7, done.stderr
    for line in lines[:4]:
        assert line.startswith("RuntimeError no bp device is available. "), line
        assert " host: host devices: " in line, line
        assert "TORCH_BACKPLANE_HOST_DEVICES is 0 (unset TORCH_BACKPLANE_HOST_DEVICES)" in line
    assert lines[4:] == ["0 False False", "warned: None", "2.0"]


def test_seeding_and_autocast_without_devices(run_forked: Run) -> None:
    done = run_forked(
        "import torch; torch.manual_seed(1); torch.bp.manual_seed(2); print(torch.bp.get_amp_supported_dtype(),\n"
        "torch.bp.is_bf16_supported())",
        TORCH_BACKPLANE_DRIVERS="host",
        TORCH_BACKPLANE_HOST_DEVICES="0",
    )
    assert done.stdout == "[] False\n", done.stderr


@pytest.mark.parametrize("count", ["1", "3", None])
def test_the_number_of_host_devices(run_forked: Run, count: str | None) -> None:
    done = run_forked(
        "import torch; print(torch.bp.device_count(), torch.zeros(1, device='bp').device)\n"
        "try: torch.zeros(1, device='bp:3')\n"
        "except RuntimeError as error: print(error)",
        TORCH_BACKPLANE_DRIVERS="host",
        TORCH_BACKPLANE_HOST_DEVICES=count,
    )
    there = "there are 3 devices (bp:0 to bp:2)" if count == "3" else "there is 1 device (bp:0)"
    expected = f"{count or 1} bp:0\nbp error: invalid device ordinal: bp:3, but {there}\n"
    assert done.stdout == expected, done.stderr


def test_the_memory_limit(run_forked: Run) -> None:
    done = run_forked(
        "import torch; print(torch.bp.get_device_properties(1).total_memory >> 20, torch.bp.mem_get_info()[1] >> 20)",
        TORCH_BACKPLANE_HOST_DEVICES="2",
        TORCH_BACKPLANE_HOST_MEMORY="1.5 GiB",
        TORCH_BACKPLANE_DRIVERS="host",
    )
    assert done.stdout == "1536 1536\n", done.stderr


def test_an_invalid_allocator_setting_raises_at_allocations(run_forked: Run) -> None:
    done = run_forked(
        "import torch; print(torch.bp.device_count())\n"
        "try: torch.zeros(1, device='bp')\n"
        "except ValueError as error: print(error)",
        TORCH_BACKPLANE_DRIVERS="host",
        PYTORCH_ALLOC_CONF="no_such_option:1",
    )
    count, error = done.stdout.splitlines()
    assert int(count) > 0
    assert error.startswith("PYTORCH_ALLOC_CONF: unknown option 'no_such_option'; known options are ")


def test_the_fallback_policy(run_python: Run) -> None:
    program = "import torch; from torch_backplane import _C; print(_C.fallback_policy().name)"
    for value in ("warn", "silent", "error"):
        assert run_python(program, TORCH_BACKPLANE_FALLBACK=value).stdout == f"{value}\n"
    assert run_python(program, TORCH_BACKPLANE_FALLBACK=None).stdout == "warn\n"


@pytest.mark.parametrize("program", ["import torch", "import torch, torch_backplane"])
@pytest.mark.parametrize(("name", "accepted"), [("FALLBACK", "warn, silent, error"), ("PLANS", "1, 0, check")])
def test_settings_for_all_devices_are_checked_at_import(
    run_python: Run, program: str, name: str, accepted: str
) -> None:
    autoload = "0" if "torch_backplane" in program else "1"
    done = run_python(
        program, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload, **{f"TORCH_BACKPLANE_{name}": "loud"}
    )
    assert done.returncode != 0
    assert f"ValueError: TORCH_BACKPLANE_{name}='loud' is not one of {accepted}" in done.stderr


def test_unknown_variables_warn_with_the_nearest_name(run_python: Run) -> None:
    program = (
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import torch\n"
        "print(*[one.message for one in caught if 'TORCH_BACKPLANE' in str(one.message)], sep='\\n')\n"
        "print(torch.bp.device_count() > 0)"
    )
    for name, meant in {
        "TORCH_BACKPLANE_FALBACK": "did you mean TORCH_BACKPLANE_FALLBACK?",
        "TORCH_BACKPLANE_HOST_DEVICE": "did you mean TORCH_BACKPLANE_HOST_DEVICES?",
        "TORCH_BACKPLANE_COLOUR": "docs/environment.md lists all variables",
    }.items():
        done = run_python(program, **{name: "1"})
        assert done.stdout == f"{name} is set, but Backplane has no such variable: {meant}\nTrue\n", done.stderr
    assert run_python(program, TORCH_BACKPLANE_PLANS="1").stdout == "\nTrue\n"


def test_third_party_drivers_have_their_own_variables(tmp_path: Path, run_python: Run) -> None:
    driver_packages.install(tmp_path, "mine", driver_packages.MINIMAL, "MinimalDriver")
    done = run_python(
        "import warnings; warnings.simplefilter('error'); import torch",
        PYTHONPATH=str(tmp_path), TORCH_BACKPLANE_MINE_SPEED="3", TORCH_BACKPLANE_DRIVERS="host",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# --- fork ------------------------------------------------------------------------------------------------------------

FORK = """
import os, sys, torch
there = torch.arange(4.0, device="bp:1")
torch.bp.Stream(1)
child = os.fork()
if child == 0:
    try:
        for use in (lambda: torch.zeros(1, device="bp"), lambda: there + 1, lambda: torch.bp.set_device(1),
                    lambda: torch.bp.Event().record(), torch.bp.synchronize, torch.bp.get_device_properties,
                    torch.bp.init):
            try:
                use()
            except RuntimeError as error:
                assert "Cannot re-initialize bp in forked subprocess" in str(error), error
                assert "'spawn' start method" in str(error), error
            else:
                raise AssertionError("no error")
        assert torch.bp._is_in_bad_fork() and not torch.bp.is_initialized()
        assert (torch.bp.device_count(), torch.bp.is_available()) == (0, False)
        torch.manual_seed(3)
        assert torch.nn.Linear(4, 4)(torch.rand(2, 4)).sum().isfinite()
        del there
    except BaseException as error:
        print("child:", repr(error), flush=True)
        os._exit(1)
    os._exit(0)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), (there + 1).tolist(), torch.bp.is_initialized(), torch.bp.device_count())
"""


def test_use_after_a_fork_is_refused_and_the_parent_still_works(run_python: Run) -> None:
    done = run_python(FORK, TORCH_BACKPLANE_HOST_DEVICES="2", TORCH_BACKPLANE_DRIVERS="host")
    assert done.stdout == "0 [1.0, 2.0, 3.0, 4.0] True 2\n", done.stderr


def test_a_child_can_use_devices_that_its_parent_has_not_used(run_python: Run) -> None:
    done = run_python(
        "import os, torch\n"
        "torch.manual_seed(1)\n"
        "if (child := os.fork()) == 0:\n"
        "    os._exit(int(torch.ones(3, device='bp').sum().item()))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), torch.bp.is_initialized())"
    )
    assert done.stdout == "3 False\n", done.stderr


FORK_AFTER_ASKING = """
import os, torch
assert torch.bp.is_available() and torch.accelerator.is_available()
before = torch.bp.device_count()
if (child := os.fork()) == 0:
    try:
        count = torch.bp.device_count()
        refused = torch.bp._is_in_bad_fork()
        try:
            result = torch.ones(3, device="bp").sum().item()
        except RuntimeError as error:
            result = str(error)
        print(count, refused, result, flush=True)
    finally:
        os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(torch.ones(3, device="bp").sum().item(), torch.bp.device_count() == before)
"""


def test_a_child_can_use_host_devices_that_its_parent_only_counted(run_python: Run) -> None:
    done = run_python(FORK_AFTER_ASKING, TORCH_BACKPLANE_HOST_DEVICES="2", TORCH_BACKPLANE_DRIVERS="host")
    assert done.stdout == "2 False 3.0\n3.0 True\n", done.stderr


def test_a_child_cannot_use_driver_devices_that_its_parent_counted(run_python: Run, tmp_path: Path) -> None:
    driver_packages.install_toy(tmp_path)
    done = run_python(
        FORK_AFTER_ASKING, TORCH_BACKPLANE_DRIVERS="toy,host", PYTHONPATH=driver_packages.python_path(tmp_path),
        TORCH_BACKPLANE_FALLBACK="silent",
    )  # fmt: skip
    first, second = done.stdout.splitlines()
    assert first.startswith("0 True Cannot re-initialize bp in forked subprocess. "), done.stderr
    assert second == "3.0 True"


def test_forked_dataloader_workers(run_python: Run) -> None:
    done = run_python(
        "import torch\n"
        "model = torch.nn.Linear(4, 1, device='bp')\n"
        "data = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(8, 4))\n"
        "loader = torch.utils.data.DataLoader(\n"
        "    data, 2, num_workers=2, multiprocessing_context='fork', pin_memory=True)\n"
        "rows = [row for (batch,) in loader for row in batch.to('bp', non_blocking=True)[:, 0].tolist()]\n"
        "print(rows, all(batch.is_pinned() for (batch,) in loader))\n"
        "print(model(torch.ones(1, 4, device='bp')).shape)"
    )
    assert done.stdout == "[0.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0, 28.0] True\ntorch.Size([1, 1])\n", done.stderr


# --- blocking launches -----------------------------------------------------------------------------------------------

OUT_OF_RANGE = """
import torch
table = torch.ones(4, 3, device="bp")
good, bad = torch.tensor([0, 3], device="bp"), torch.tensor([0, 4], device="bp")
for _ in range(3):  # recorded as a plan, as a dynamic-shape plan, replayed
    try:
        table.index_select(0, bad)
        where = "later"
        torch.bp.synchronize()
    except IndexError:
        where = "later" if "where" in globals() and where == "later" else "at the call"
    print(where)
    where = None
    print(table.index_select(0, good).sum().item())
    bad, good = torch.cat([good, bad]), torch.cat([good, good])
torch._foreach_add_([table], 1)
print(table._version)
"""


@pytest.mark.parametrize(("blocking", "where"), [("1", "at the call"), ("0", "later")])
def test_launch_blocking_raises_kernel_errors_at_the_call(
    run_python: Run, request: pytest.FixtureRequest, blocking: str, where: str
) -> None:
    request.getfixturevalue("platform")
    done = run_python(OUT_OF_RANGE, TORCH_BACKPLANE_LAUNCH_BLOCKING=blocking, TORCH_BACKPLANE_DRIVERS="opencl")
    sums = ("6.0", "12.0", "24.0")
    assert done.stdout.split("\n")[:6] == [line for one in sums for line in (where, one)], done.stderr
    assert done.stdout.split("\n")[6] == "1"


def test_launch_blocking_is_0_or_1(run_python: Run) -> None:
    done = run_python("import torch_backplane", TORCH_BACKPLANE_LAUNCH_BLOCKING="yes")
    assert "ValueError: TORCH_BACKPLANE_LAUNCH_BLOCKING='yes' is not one of 0, 1" in done.stderr
