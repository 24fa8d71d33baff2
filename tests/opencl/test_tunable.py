"""torch.bp.tunable: candidates are timed, the fastest one is used, and files store the results."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from agreement import DEVICE
from targets import host_first, target
from test_backends import runs_on_host
from test_host_work import needs_sight
from typer.testing import CliRunner

from torch_backplane import _C, drivers, plans
from torch_backplane.cli import app
from torch_backplane.operators import linear_algebra
from torch_backplane.tuning import context, forced
from torch_backplane.tuning.trials import ROUNDS, Clock

tunable: Any = torch.bp.tunable  # type: ignore[attr-defined]


@contextmanager
def _isolated() -> Iterator[None]:
    """Uses a temporary folder, initial settings and no results, and restores the clock afterwards.

    The driver's libraries are left out, because their kernels take long to compile. test_library_products.py and
    test_library_transforms.py test them.
    """
    before = os.getcwd()
    plain = {"_results": {}, "_benchmarked": {}, "_recorded": set(), "_unwritable": set(), "inserts_ordinal": True}
    with (
        tempfile.TemporaryDirectory() as folder,
        host_first(),
        mock.patch.multiple(context, _set=dict(context._set), **plain),
        mock.patch.object(Clock, "milliseconds", Clock.milliseconds),
        mock.patch.object(drivers.device(0), "libraries", ()),
    ):
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
            _C.advance_configuration_epoch()


isolated = _isolated()  # decorates tests


class Times:
    """Replaces the clock: gives each candidate a fixed time, or a time per trial, and records the trials."""

    def __init__(self, family: str = "products", **milliseconds: float | list[float]) -> None:
        self.milliseconds, self.family = milliseconds, family
        self.trials: list[str] = []
        timed = Clock.milliseconds
        Clock.milliseconds = lambda clock: self._say(timed(clock))  # type: ignore[method-assign]

    def _say(self, _: float) -> float:
        candidate = forced(self.family)
        if candidate is None:
            return 1.0
        given = self.milliseconds.get(candidate, 5.0)
        one = given if isinstance(given, float) else given[min(self.trials.count(candidate), len(given) - 1)]
        self.trials.append(candidate)
        return one


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE)


def lines() -> list[str]:
    return Path("tunableop_results0.csv").read_text(encoding="utf-8").splitlines()


@isolated
def test_fastest_candidate_is_used_after_tuning() -> None:
    needs_sight()
    timed = Times(generated=1.0, host=2.0)
    a, b, c = random(70, 50), random(50, 90), random(90, 80)
    assert runs_on_host(torch.mm, a, b)
    tunable.enable()
    for _ in range(3):
        torch.testing.assert_close((a @ b).cpu(), a.cpu() @ b.cpu())
        assert not runs_on_host(torch.mm, a, b)
    assert sorted(set(timed.trials)) == ["generated", "host"]
    count = len(timed.trials)
    a @ b
    a.clone() @ b.clone()
    assert len(timed.trials) == count
    timed.milliseconds = {"generated": 2.0, "host": 1.0}
    for _ in range(3):  # other sizes, layouts and dtypes are separate problems
        torch.testing.assert_close((b @ c).cpu(), b.cpu() @ c.cpu())
    assert len(timed.trials) == count + count // 2  # no second measurement if the default candidate is the fastest
    torch.testing.assert_close((b.t() @ a.t()).cpu(), (b.t().cpu() @ a.t().cpu()))
    assert len(timed.trials) == 2 * count
    assert runs_on_host(torch.mm, b, c)
    assert not runs_on_host(torch.mm, a, b)
    tunable.enable(False)
    assert runs_on_host(torch.mm, a, b)
    tunable.enable()
    tunable.tuning_enable(False)
    assert not runs_on_host(torch.mm, a, b)
    assert runs_on_host(torch.mm, random(90, 50), b)  # untuned
    assert len(timed.trials) == 2 * count
    torch.backends.bp.preferred_blas_library("host")  # type: ignore[attr-defined]
    try:
        assert runs_on_host(torch.mm, a, b)  # an explicit preference comes first
    finally:
        torch.backends.bp.preferred_blas_library("default")  # type: ignore[attr-defined]


@isolated
@pytest.mark.parametrize(
    "quick",
    [
        pytest.param([1.0] * ROUNDS + [3.0], id="in its first rounds"),
        pytest.param([1.0, 3.0] * ROUNDS, id="in every other round"),
        pytest.param([1.0] * (ROUNDS - 2) + [2.1, 2.1] + [1.0] * ROUNDS, id="but not in two rounds"),
        pytest.param([1.99], id="by what times scatter"),
    ],
)
def test_candidates_that_were_fast_by_chance_are_not_used(quick: list[float]) -> None:
    needs_sight()
    Times(generated=quick, host=2.0)
    tunable.enable()
    assert runs_on_host(torch.mm, random(70, 50), random(50, 90))
    assert [one[2] for one in tunable.get_results()] == ["host"]


@isolated
def test_results_are_correct_while_many_shapes_are_tuned() -> None:
    tunable.enable()
    tunable.set_max_tuning_iterations(1)
    sizes = ((3, 4, 5), (8, 2, 9), (3, 4, 5), (1, 7, 1), (16, 16, 16), (8, 2, 9), (5, 0, 3), (90, 80, 70))
    for rows, depth, columns in sizes * 2:
        for batch in ((), (3,), (1,)):
            a, b = torch.randn(*batch, rows, depth), torch.randn(*batch, depth, columns)
            for x, y in ((a, b), (a.mT.contiguous().mT, b), (a, b.mT.contiguous().mT)):
                found = (x.to(DEVICE) @ y.to(DEVICE)).cpu()
                torch.testing.assert_close(found, x @ y, atol=1e-4, rtol=1e-4)
    results = tunable.get_results()
    assert len({one[:2] for one in results}) == len(results)
    if linear_algebra.host_refuses(torch.empty(1, device=DEVICE)) is None:  # a single candidate is not timed
        assert len(results) > 20


@isolated
def test_tuning_leaves_generators_and_streams_unchanged() -> None:
    needs_sight()
    a, b = random(6, 6), random(6, 6)
    torch.bp.manual_seed(3)  # type: ignore[attr-defined]
    states = torch.get_rng_state(), torch.bp.get_rng_state(), torch.bp.current_stream()  # type: ignore[attr-defined]
    tunable.enable()
    torch.addmm(a, a, b)
    torch.baddbmm(a[None], a[None], b[None], beta=0)
    assert torch.equal(states[0], torch.get_rng_state())
    assert torch.equal(states[1], torch.bp.get_rng_state())  # type: ignore[attr-defined]
    assert states[2] == torch.bp.current_stream()  # type: ignore[attr-defined]
    (name, parameters, candidate, milliseconds), (_, batched, *_) = tunable.get_results()
    assert (name, parameters) == ("ProductTunableOp_float32", "a=6x6:6x1 b=6x6:6x1 added=1")
    assert batched == "a=1x6x6:36x6x1 b=1x6x6:36x6x1 added=0"
    assert candidate in ("host", "generated")
    assert 0 < milliseconds < 1000
    assert lines()[:4] == [f"Validator,{key},{value}" for key, value in tunable.get_validators()]
    assert lines()[4].split(",")[:3] == [name, parameters, candidate]
    assert len(lines()) == 6


@isolated
def test_convolutions_are_tuned() -> None:
    needs_sight()
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no oneDNN, so convolutions have a single candidate")
    timed = Times("convolutions", generated=1.0, host=2.0)
    x, w = torch.randn(2, 4, 9, 9, requires_grad=True), torch.randn(6, 2, 3, 3, requires_grad=True)
    given = [one.detach().to(DEVICE).requires_grad_() for one in (x, w)]
    tunable.enable()
    for settings in ({"stride": 2, "groups": 2}, {"padding": 1, "groups": 2}, {"stride": 2, "groups": 2}):
        found, expected = F.conv2d(*given, None, **settings), F.conv2d(x, w, None, **settings)  # type: ignore[call-overload]
        torch.testing.assert_close(found.cpu(), expected)
        grads = torch.autograd.grad(found.square().sum(), given)
        for one, other in zip(grads, torch.autograd.grad(expected.square().sum(), (x, w)), strict=True):
            torch.testing.assert_close(one.cpu(), other, atol=1e-4, rtol=1e-4)
    assert set(timed.trials) == {"host", "generated", "generated/winograd"}
    names = [one[0] for one in tunable.get_results() if not one[0].startswith("Product")]
    assert names == ["ConvolutionTunableOp_float32", "ConvolutionBackwardTunableOp_float32"] * 2
    assert {one[2] for one in tunable.get_results() if one[0].startswith("Conv")} == {"generated"}


@isolated
def test_empty_convolutions_are_not_tuned() -> None:
    needs_sight()
    timed = Times("convolutions")
    tunable.enable()
    weight, settings = random(6, 4, 3, 3), ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    for batch in (0, 2, 0):
        x, grad = random(batch, 4, 9, 9), random(batch, 6, 7, 7)
        before = len(tunable.get_results()), len(timed.trials)
        # Calls the overrideable operators directly, because PyTorch's convolution handles empty tensors itself.
        assert torch.ops.aten.convolution_overrideable(x, weight, None, *settings).shape == grad.shape
        grads = torch.ops.aten.convolution_backward_overrideable(grad, x, weight, *settings, [True, True, True])
        assert [tuple(one.shape) for one in grads] == [tuple(x.shape), (6, 4, 3, 3), (6,)]
        assert batch or not any(one.any() for one in grads)
        assert ((len(tunable.get_results()), len(timed.trials)) == before) == (batch == 0)


@isolated
def test_transforms_are_tuned() -> None:
    needs_sight()
    timed = Times("transforms", generated=1.0, host=2.0)
    x = torch.randn(3, 20)
    tunable.enable()
    for _ in range(2):
        found, expected = (torch.fft.irfft(torch.fft.fft(torch.fft.rfft(one))) for one in (x.to(DEVICE), x))
        torch.testing.assert_close(found.cpu(), expected)
    assert set(timed.trials) == {"host", "generated"}
    assert [one[0] for one in tunable.get_results()] == [
        "TransformTunableOp_float32", "TransformTunableOp_complex64", "TransformTunableOp_complex64"
    ]  # fmt: skip
    assert {one[2] for one in tunable.get_results()} == {"generated"}


@isolated
def test_attention_is_tuned() -> None:
    needs_sight()
    timed = Times("attention", generated=2.0, host=1.0)
    given = [torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3)]
    there = [one.detach().to(DEVICE).requires_grad_() for one in given]
    tunable.enable()
    for _ in range(2):
        for is_causal in (False, True):
            found, expected = (
                F.scaled_dot_product_attention(*tensors, is_causal=is_causal) for tensors in (there, given)
            )
            torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-4)
            for ours, theirs in zip(
                torch.autograd.grad(found.sum(), there), torch.autograd.grad(expected.sum(), given), strict=True
            ):
                torch.testing.assert_close(ours.cpu(), theirs, atol=1e-5, rtol=1e-4)
    assert set(timed.trials) == {"host", "generated"}
    names = ["AttentionTunableOp_float32", "AttentionBackwardTunableOp_float32"]
    assert [one[0] for one in tunable.get_results()] == names * 2
    assert {one[2] for one in tunable.get_results()} == {"host"}


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@isolated
def test_recurrent_layers_are_tuned(kind: str) -> None:
    needs_sight()
    timed = Times("recurrent layers", generated=1.0, host=2.0)
    layer, x = getattr(torch.nn, kind)(5, 7), torch.randn(4, 3, 5)
    expected = layer(x)[0]
    expected.sum().backward()
    weights = [one.grad for one in layer.parameters()]
    there = getattr(torch.nn, kind)(5, 7).to(DEVICE)
    there.load_state_dict(layer.state_dict())
    tunable.enable()
    for _ in range(2):
        there.zero_grad()
        found = there(x.to(DEVICE))[0]
        torch.testing.assert_close(found.cpu(), expected)
        found.sum().backward()
        for one, other in zip(there.parameters(), weights, strict=True):
            assert one.grad is not None
            torch.testing.assert_close(one.grad.cpu(), other)
    assert set(timed.trials) == {"host", "generated"}
    layers = [one for one in tunable.get_results() if not one[0].startswith("Product")]
    assert [one[2] for one in layers] == ["generated"]


@pytest.mark.parametrize("form", ["tile=32", "tile=16", "tile=64/whole", "tile=32/whole", "tile=16/whole"])
@isolated
def test_gpu_targets_have_tile_candidates(form: str) -> None:
    timed = Times(**{f"generated/{form}": 1.0})
    with target("gpu"):
        tunable.enable()
        tunable.set_max_tuning_iterations(1)
        for rows, depth, columns in ((70, 3, 33), (9, 700, 40), (1, 5, 8)):
            a, b = torch.randn(rows, depth), torch.randn(depth, columns)
            torch.testing.assert_close((a.to(DEVICE) @ b.to(DEVICE)).cpu(), a @ b, atol=1e-4, rtol=1e-4)
        chosen = [one[2] for one in tunable.get_results()]
        assert f"generated/{form}" in timed.trials
        assert set(chosen) == {f"generated/{form}"}


@isolated
def test_results_are_read_from_files() -> None:
    needs_sight()
    timed = Times(generated=1.0, host=2.0)
    tunable.enable()
    a, b = random(70, 50), random(50, 90)
    a @ b
    count = len(timed.trials)
    context._results.clear()
    assert not runs_on_host(torch.mm, a, b)  # the file is read on demand
    assert len(timed.trials) == count
    for candidate, on_host in (("Default", True), ("generated", False), ("of another version", True), ("host", True)):
        file = Path(f"other_{on_host}.csv")
        file.write_text("\n".join([*lines()[:-1], lines()[-1].replace("generated", candidate)]), encoding="utf-8")
        assert tunable.read_file(str(file))
        assert runs_on_host(torch.mm, a, b) == on_host
    assert len(timed.trials) == count


GOOD = "ProductTunableOp_float32,a=70x50:50x1 b=50x90:90x1 added=0,generated,0.1"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("ProductTunableOp_float32,a=70x50:50x1", "a result needs operator, parameters, candidate and milliseconds"),
        (GOOD.replace("Tunable", ""), "is not an operator and dtype"),
        (GOOD.replace("float32", "float31"), "is not an operator and dtype"),
        (GOOD.replace("70x50:50x1", "seven"), "'a=seven' is not a parameter"),
        (GOOD.replace("0.1", "soon"), "soon"),
        (GOOD.replace("0.1", "-1"), "milliseconds must be finite and not negative, but got -1"),
        (GOOD.replace(",generated", ","), "a result needs operator"),
        ("Validator,PT_VERSION", "a validator needs a name and a value"),
        ("Validator,PT_VERSION,1.0", "the results are for PT_VERSION 1.0, but here it is"),
        ("Validator,ROCM_VERSION,6.0", "the results are for ROCM_VERSION 6.0, but known are PT_VERSION"),
    ],
)
@isolated
def test_invalid_or_stale_files_are_rejected_with_the_line(line: str, reason: str) -> None:
    needs_sight()
    Times(generated=1.0, host=2.0)
    file = Path("tunableop_results0.csv")
    header = [f"Validator,{name},{value}" for name, value in tunable.get_validators()]
    text = "\n".join([*header, GOOD.replace("generated", "host"), line, ""])
    file.write_text(text, encoding="utf-8")
    tunable.enable()
    a, b = random(70, 50), random(50, 90)
    with pytest.warns(UserWarning, match="tuning results were not read") as caught:
        assert not runs_on_host(torch.mm, a, b)  # no result of the file was used: the call was tuned
    assert any(f"tunableop_results0.csv:{len(header) + 2}: " in str(one.message) for one in caught)
    assert any(reason in str(one.message) for one in caught)
    assert file.read_text(encoding="utf-8") == text  # unchanged
    with pytest.warns(UserWarning, match="not read"):
        assert not tunable.read_file()
    assert not runs_on_host(torch.mm, a, b)
    assert tunable.read_file("tunableop_results0.csv") is False


@isolated
def test_files_without_validators_or_text_are_rejected() -> None:
    for content in (GOOD.encode(), b"\xff\xfe\x00"):
        Path("bad.csv").write_bytes(content)
        with pytest.warns(UserWarning, match="bad.csv:1: "):
            assert not tunable.read_file("bad.csv")
    with pytest.warns(UserWarning, match="no_such.csv"):
        assert not tunable.read_file("no_such.csv")


@isolated
def test_untuned_calls_are_recorded_and_tuned_later() -> None:
    needs_sight()
    timed = Times(generated=1.0, host=2.0)
    tunable.enable()
    tunable.tuning_enable(False)
    tunable.record_untuned_enable()
    shapes = [(70, 50, 90), (80, 60, 70), (70, 50, 90)]
    for rows, depth, columns in shapes:
        random(rows, depth) @ random(depth, columns)
    recorded = Path("tunableop_untuned0.csv").read_text(encoding="utf-8").splitlines()
    assert recorded == [
        "ProductTunableOp_float32,a=70x50:50x1 b=50x90:90x1 added=0",
        "ProductTunableOp_float32,a=80x60:60x1 b=60x70:70x1 added=0",
    ]
    assert not timed.trials
    with pytest.raises(AssertionError, match="Tuning is not enabled"):
        tunable.tune_gemm_in_file("tunableop_untuned0.csv")
    tunable.tuning_enable()
    tunable.record_untuned_enable(False)
    tunable.tune_gemm_in_file("tunableop_untuned0.csv")
    assert [one[2] for one in tunable.get_results()] == ["generated"] * 2
    count = len(timed.trials)
    assert not runs_on_host(torch.mm, random(70, 50), random(50, 90))
    assert len(timed.trials) == count
    tunable.enable(False)
    with pytest.raises(AssertionError, match="TunableOp is not enabled"):
        tunable.tune_gemm_in_file("tunableop_untuned0.csv")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("Product", "untuned.csv:2: a problem needs operator and parameters"),
        ("ProductTunableOp_float32,a", "untuned.csv:2: 'a' is not a parameter"),
        ("GemmTunableOp_float32,a=1", "unknown operator GemmTunableOp_float32: known are Attention"),
        ("ProductTunableOp_float32,a=3x4:4x1 added=0", "the parameter b is missing; got a, added"),
        ("ProductTunableOp_float32,a=3x4 b=4x4:4x1 added=0", "a=3x4 is not a tensor"),
        ("ProductTunableOp_float32,a=- b=4x4:4x1 added=0", "a=- is not a tensor"),
    ],
)
@isolated
def test_invalid_lists_of_untuned_calls_are_rejected(line: str, reason: str) -> None:
    Path("untuned.csv").write_text(f"ProductTunableOp_float32,a=2x2:2x1 b=2x2:2x1 added=0\n{line}\n", encoding="utf-8")
    tunable.enable()
    with pytest.raises(ValueError, match=reason):
        tunable.tune_gemm_in_file("untuned.csv")
    done = CliRunner().invoke(app, ["tune", "untuned.csv"], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert reason in done.output


@isolated
def test_failing_and_inaccurate_candidates_are_left_out() -> None:
    needs_sight()
    Times(generated=1.0, host=2.0)
    tunable.enable()
    good = linear_algebra.run_template

    def fails(*arguments: Any, **options: Any) -> None:
        if forced("products"):
            raise RuntimeError("out of registers\nand more")
        good(*arguments, **options)

    a, b = random(70, 50), random(50, 90)
    warned = pytest.warns(UserWarning, match="generated is left out for .*out of registers")
    with mock.patch.object(linear_algebra, "run_template", fails), warned:
        assert runs_on_host(torch.mm, a, b)
    tunable.set_numerical_check_tolerances(True, 0.0, 0.0)
    c, d = random(70, 500), random(500, 90)
    with pytest.warns(UserWarning, match="generated is left out for .*Tensor-likes are not"):
        assert runs_on_host(torch.mm, c, d)
    tunable.set_numerical_check_tolerances(True, 1e-3, 1e-3)
    assert not runs_on_host(torch.mm, d[:400], random(90, 30))
    tunable.set_numerical_check_tolerances(False)


@isolated
def test_results_that_cannot_be_written_stay_in_memory() -> None:
    needs_sight()
    Times(generated=1.0, host=2.0)
    tunable.set_filename("no/such/folder.csv")
    tunable.enable()
    a, b = random(70, 50), random(50, 90)
    with pytest.warns(UserWarning, match="tuning results were not written: .*no/such"):
        assert not runs_on_host(torch.mm, a, b)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not runs_on_host(torch.mm, b, random(90, 80))  # warned once
    assert len(tunable.get_results()) == 2


@isolated
def test_filenames() -> None:
    assert tunable.get_filename() == "tunableop_results0.csv"
    tunable.set_filename("x.csv")
    assert tunable.get_filename() == "x.csv"
    tunable.set_filename("x.csv", insert_device_ordinal=True)
    assert tunable.get_filename() == "x0.csv"
    tunable.set_filename("folder/x_%d.csv")
    assert tunable.get_filename() == "folder/x_0.csv"
    with pytest.raises(ValueError, match="filename must be a file name, but got ''"):
        tunable.set_filename("")
    assert tunable.get_filename() == "folder/x_0.csv"


@isolated
def test_tuning_limits() -> None:
    assert (tunable.get_max_tuning_duration(), tunable.get_max_tuning_iterations()) == (30, 100)
    tunable.set_max_tuning_duration(7)
    tunable.set_max_tuning_iterations(3)
    assert (tunable.get_max_tuning_duration(), tunable.get_max_tuning_iterations()) == (7, 3)
    for bad in (-1, 2.5, "3"):
        with pytest.raises(ValueError, match="duration must be a non-negative integer, but got"):
            tunable.set_max_tuning_duration(bad)
        with pytest.raises(ValueError, match="iterations must be"):
            tunable.set_max_tuning_iterations(bad)
    assert tunable.get_rotating_buffer_size() >= 0
    tunable.set_rotating_buffer_size(2)
    assert tunable.get_rotating_buffer_size() == 2048


def program(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {key: value for key, value in os.environ.items() if not key.startswith("PYTORCH_TUNABLEOP_")}
    command = [sys.executable, "-c", "import torch\na, b = (torch.ones(4, 4, device='bp') for _ in 'ab')\n" + text]
    return subprocess.run(command, env=given | environment, capture_output=True, text=True, timeout=300, check=False)


@isolated
def test_environment_variables_take_precedence() -> None:
    needs_sight()
    done = program(
        "t = torch.bp.tunable; t.enable(False); t.set_max_tuning_iterations(5); t.set_filename('other.csv')\n"
        "a @ b; print(t.is_enabled(), t.get_max_tuning_iterations(), t.get_filename(), len(t.get_results()))",
        PYTORCH_TUNABLEOP_ENABLED="1",
        PYTORCH_TUNABLEOP_MAX_TUNING_ITERATIONS="2",
        PYTORCH_TUNABLEOP_FILENAME="mine%d.csv",
        PYTORCH_TUNABLEOP_TUNING="perhaps",
        PYTORCH_TUNABLEOP_VERBOSE="1",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True 2 mine0.csv 1"
    assert "tuned ProductTunableOp_float32 a=4x4:4x1" in done.stdout
    assert "PYTORCH_TUNABLEOP_TUNING='perhaps' is ignored: it must be 0 or 1" in done.stderr
    assert Path("mine0.csv").exists()


@isolated
@pytest.mark.slow
def test_several_processes_write_one_file() -> None:
    needs_sight()
    text = "for n in range(2, 12): torch.ones({}, n, device='bp') @ torch.ones(n, 3, device='bp')"
    settings = {"PYTORCH_TUNABLEOP_ENABLED": "1", "PYTORCH_TUNABLEOP_MAX_TUNING_ITERATIONS": "1"}
    given = os.environ | settings
    commands = [[sys.executable, "-c", "import torch\n" + text.format(rows)] for rows in (5, 6, 5)]
    running = [subprocess.Popen(command, env=given) for command in commands]
    assert [one.wait(300) for one in running] == [0, 0, 0]
    assert tunable.read_file()
    assert len(tunable.get_results()) == 20


@isolated
def test_lists_are_tuned_by_mgpu_function_and_by_the_command() -> None:
    needs_sight()
    Path("untuned0.csv").write_text("ProductTunableOp_float32,a=4x2:2x1 b=2x3:3x1 added=0\n", encoding="utf-8")
    Path("untuned1.csv").write_text(
        "ProductTunableOp_float32,a=4x2:2x1 b=2x3:3x1 added=0\nProductTunableOp_bfloat16,a=4x5:5x1 b=5x3:3x1 added=0\n",
        encoding="utf-8",
    )
    tunable.enable()
    tunable.set_max_tuning_iterations(2)
    with pytest.raises(AssertionError, match="num_gpus must be between 1 and 2, got 3"):
        tunable.mgpu_tune_gemm_in_file("untuned?.csv", 3)
    with pytest.raises(ValueError, match="bp:1 must be like bp:0"):
        tunable.mgpu_tune_gemm_in_file("untuned?.csv", 2)
    with pytest.raises(ValueError, match="no file matches nothing"):
        tunable.mgpu_tune_gemm_in_file("nothing*.csv", 1)
    tunable.mgpu_tune_gemm_in_file("untuned?.csv", 1)
    assert tunable.read_file("tunableop_results_full0.csv")
    assert len(tunable.get_results()) == 2
    done = CliRunner().invoke(
        app, ["tune", "untuned1.csv", "--output", "tuned.csv", "--iterations", "2"], env={"COLUMNS": "200"}
    )
    assert done.exit_code == 0, done.output
    assert "2 operators; results are in tuned.csv" in done.output
    for options, reason in (
        (["no.csv"], "no.csv"),
        (["untuned1.csv", "--device", "7"], "--device 7 is not in the range 0 to 1"),
    ):
        done = CliRunner().invoke(app, ["tune", *options], env={"COLUMNS": "200"})
        assert done.exit_code == 2
        assert reason in done.output


@isolated
def test_tuned_calls_are_replayed() -> None:
    needs_sight()
    tunable.enable()
    a, b = random(70, 50), random(50, 90)
    for _ in range(3):
        a @ b
    before = plans.stats()["aten::mm"]["replays"]
    for _ in range(5):
        a @ b
    assert plans.stats()["aten::mm"]["replays"] - before == 5


@isolated
def test_benchmark_tunes_a_family_in_this_process() -> None:
    needs_sight()
    conv = torch.backends.bp.conv  # type: ignore[attr-defined]
    timed = Times("convolutions", generated=1.0, host=2.0)
    x, w = random(2, 3, 9, 9), random(4, 3, 3, 3)
    assert runs_on_host(F.conv2d, x, w)
    assert not conv.benchmark
    with pytest.raises(TypeError, match="benchmark must be a bool, but got 1"):
        conv.benchmark = 1
    conv.benchmark = True
    for _ in range(2):
        torch.testing.assert_close(F.conv2d(x, w).cpu(), F.conv2d(x.cpu(), w.cpu()), atol=1e-5, rtol=1e-5)
        assert not runs_on_host(F.conv2d, x, w)
    count = len(timed.trials)
    assert runs_on_host(torch.mm, random(90, 80), random(80, 70))  # another family
    assert not any(Path().iterdir())
    with conv.flags(benchmark=False):
        assert not conv.benchmark
        assert runs_on_host(F.conv2d, x, w)
    assert conv.benchmark
    assert not torch.backends.bp.rnn.benchmark  # type: ignore[attr-defined]
    assert not runs_on_host(F.conv2d, x, w)
    assert len(timed.trials) == count
    timed.milliseconds = {"host": 1.0}
    tunable.enable()  # uses a file, not the results of `benchmark`
    assert runs_on_host(F.conv2d, x, w)
    assert len(lines()) == 5
    tunable.enable(False)
    assert not runs_on_host(F.conv2d, x, w)
    conv.benchmark = False
    assert runs_on_host(F.conv2d, x, w)
