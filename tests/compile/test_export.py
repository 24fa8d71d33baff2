"""torch.export on bp, and torch.compile of exported programs; tracing itself is in test_dynamo.py."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.passes import move_to_device_pass
from torch.nn.attention.flex_attention import flex_attention

from torch_backplane import drivers

HAS_KERNELS = bool(drivers.device(0).properties.dialect)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


class Model(nn.Module):
    """Parameters, a buffer, a constant, tensors that the program creates, attention and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.convolution = nn.Linear(4, 4), nn.Conv1d(1, 2, 3, padding=1)
        self.register_buffer("offset", torch.ones(4))
        self.constant = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        attended = F.scaled_dot_product_attention(self.linear(x)[None], x[None], x[None])[0]
        padded = torch.cat([attended, torch.zeros(1, 4, device=x.device)])
        scaled = padded + torch.arange(4, device=x.device) * self.constant.to(x.device)
        return self.convolution(scaled.unsqueeze(1)).sum(1) + self.offset


def exported(model: nn.Module, x: Tensor) -> ExportedProgram:
    return export(model, (x,), dynamic_shapes={"x": {0: Dim("rows", min=2)}})


def stored(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def agree(module: nn.Module, model: nn.Module) -> None:
    for rows in (3, 6):
        x = torch.randn(rows, 4)
        found, expected = module(x.to("bp")), model(x)
        assert found.device.type == "bp"
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, check_device=False)


def test_programs_that_were_exported_on_bp() -> None:
    model, on_bp = Model(), Model().to("bp")
    on_bp.load_state_dict(model.state_dict())
    program = exported(on_bp, torch.randn(5, 4, device="bp"))
    agree(program.module(), model)
    agree(stored(program).module(), model)
    agree(torch.compile(stored(program).module()), model)


def test_programs_that_were_exported_on_the_cpu() -> None:
    model = Model()
    program = stored(move_to_device_pass(exported(model, torch.randn(5, 4)), "bp:0"))
    agree(program.module(), model)
    agree(torch.compile(program.module(), fullgraph=True), model)
    assert {one.device.type for one in program.state_dict.values()} == {"bp"}
    x = torch.randn(4, 4)
    torch.testing.assert_close(move_to_device_pass(program, "cpu").module()(x), model(x))


def test_flex_attention_in_a_program() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            query = x[None, None]
            return flex_attention(query, query, query, lambda score, b, h, i, j: score - (i - j).abs())[0, 0]

    model, x = Attention(), torch.randn(5, 4)
    program = export(Attention(), (x.to("bp"),))
    found = program.module()(x.to("bp"))  # Dynamo cannot trace the operator again, for no device
    torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-4, check_device=False)


def test_aot_inductor_is_refused() -> None:
    program = export(nn.Linear(4, 4).to("bp"), (torch.randn(5, 4, device="bp"),))
    with pytest.raises(Exception, match="AOTInductor, does not support bp devices; use"):
        torch._inductor.aoti_compile_and_package(program)


@pytest.mark.skipif(not HAS_KERNELS, reason="Inductor compiles for the CPU, whose C++ wrapper works")
def test_the_cpp_wrapper_is_refused() -> None:
    compiled = torch.compile(lambda x: x + 1, options={"cpp_wrapper": True})
    with pytest.raises(Exception, match="C\\+\\+ wrapper, and thus AOTInductor, does not support bp devices"):
        compiled(torch.ones(3, device="bp"))
