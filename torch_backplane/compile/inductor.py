"""Registers bp with Inductor: scheduling, wrapper, device operations and cache key.

Nothing here changes what Inductor does for other devices.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.torch_version import TorchVersion

from torch_backplane import _C, drivers
from torch_backplane.compile import cpu_indices, flex_attention, random_numbers
from torch_backplane.compile.kernel_functions import ATOMIC_DTYPES
from torch_backplane.kernels.dtypes import FACTS
from torch_backplane.preferences import inductor_backend, preferred

_TORCH_FOR_TRITON = "2.13"  # the release with the parts of Inductor that triton_runtime.py extends


class _GpuTypes(list[str]):
    """PyTorch's list of GPU types. It contains "bp" when asked, but does not list it."""

    def __contains__(self, kind: object) -> bool:
        return kind == "bp" or super().__contains__(kind)


def treat_as_gpu(utils: ModuleType) -> None:
    """Makes `torch._inductor.utils.is_gpu("bp")` true."""
    utils.GPU_TYPES = _GpuTypes(utils.GPU_TYPES)  # type: ignore[attr-defined]
    is_big_gpu: Callable[..., bool] = utils.is_big_gpu  # type: ignore[attr-defined]

    @functools.wraps(is_big_gpu)
    def has_templates(index_or_device: int | torch.device = 0) -> bool:
        """False for bp, without the warning that a device with less than 68 compute units is small for templates."""
        if isinstance(index_or_device, torch.device) and index_or_device.type == "bp":
            return False
        return is_big_gpu(index_or_device)

    utils.is_big_gpu = has_templates  # type: ignore[attr-defined]


def avoid_missing_atomics(module: ModuleType) -> None:
    """Lets graphs on bp call PyTorch's operator for additions at indices in other dtypes than ATOMIC_DTYPES.

    `module` is one that has Inductor's function `needs_fallback_due_to_atomic_add_limitations`.
    """
    needs_fallback: Callable[..., bool] = module.needs_fallback_due_to_atomic_add_limitations  # type: ignore[attr-defined]

    @functools.wraps(needs_fallback)
    def decide(dtype: torch.dtype) -> bool:
        from torch._inductor.virtualized import V

        if "bp" in getattr(V.graph, "device_types", ()) and dtype not in ATOMIC_DTYPES:
            return True
        return needs_fallback(dtype)

    module.needs_fallback_due_to_atomic_add_limitations = decide  # type: ignore[attr-defined]


def avoid_missing_dtypes(lowering: ModuleType) -> None:
    """Lets graphs on bp call PyTorch's operators for tensors of dtypes that kernels lack, such as float8.

    `lowering` is `torch._inductor.lowering`.
    """
    is_unsupported: Callable[..., bool] = lowering.unsupported_input_tensor  # type: ignore[attr-defined]

    @functools.wraps(is_unsupported)
    def decide(t: torch.Tensor, node: Any = None) -> bool:
        return (t.device.type == "bp" and t.dtype not in FACTS) or is_unsupported(t, node)

    lowering.unsupported_input_tensor = decide  # type: ignore[attr-defined]


def make_templates(lowering: ModuleType) -> None:
    """Lets products and convolutions of bp be templates under max-autotune (fused_templates.py).

    `lowering` is `torch._inductor.lowering`.
    """
    aten = torch.ops.aten
    lowerings: dict[Any, Callable[..., Any]] = lowering.lowerings  # type: ignore[attr-defined]
    for operator in (aten.mm, aten.bmm, aten.addmm, aten.baddbmm):
        for key in (operator, operator.default):
            lowerings[key] = _product_lowering(lowerings[key])
    for key in (aten.convolution, aten.convolution.default):
        lowerings[key] = _convolution_lowering(lowerings[key])


def _product_lowering(lower: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(lower)
    def lower_product(*operands: Any, **options: Any) -> Any:
        scales = (options.get("alpha", 1), options.get("beta", 1))
        are_numbers = all(isinstance(one, (int, float)) for one in scales)
        if not options.keys() <= {"alpha", "beta"} or not are_numbers or not _are_templates(operands):
            return lower(*operands, **options)
        from torch_backplane.compile import fused_templates

        return fused_templates.lower_product(*operands, scales=scales)

    return lower_product


def _convolution_lowering(lower: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(lower)
    def lower_convolution(x: Any, weight: Any, bias: Any, *settings: Any) -> Any:
        stride, padding, dilation, transposed, _, groups = settings
        found = None
        if not transposed and _are_templates([one for one in (x, weight, bias) if one is not None]):
            from torch_backplane.compile import fused_templates

            steps = {"stride": stride, "padding": padding, "dilation": dilation}
            found = fused_templates.lower_convolution(x, weight, bias, steps, groups)
        if found is None:
            found = lower(x, weight, bias, *settings)
        return found

    return lower_convolution


def _are_templates(operands: Sequence[Any]) -> bool:
    """Whether products or convolutions with these operands become templates."""
    from torch._inductor import config, ir

    if not (config.max_autotune or config.max_autotune_gemm) or _writes_triton():
        return False
    if not all(isinstance(one, ir.IRNode) for one in operands):  # mm with a dtype for the result
        return False
    dtypes = {one.get_dtype() for one in operands}
    return (
        all(one.get_device().type == "bp" for one in operands)
        and len(dtypes) == 1
        and dtypes <= {torch.float32, torch.float16, torch.bfloat16}
    )


def keep_layouts_of_convolutions(graph: ModuleType) -> None:
    """Lets convolutions on bp keep the layouts of eager PyTorch on GPUs, in `torch._inductor.graph`.

    Inductor prefers channels last for cuDNN. Generated kernels compute on contiguous tensors, so each convolution would
    copy its operands and its results twice. If the driver has a library of convolutions, Inductor decides.
    """
    lowering: Any = graph.GraphLowering  # type: ignore[attr-defined]
    decide: Callable[..., bool] = lowering.decide_layout_opt

    @functools.wraps(decide)
    def decide_layout_opt(*given: Any, **named: Any) -> bool:
        from torch._inductor import config

        decided = decide(*given, **named)
        graph = (given[0] if given else named["gm"]).graph
        return decided and (config.force_layout_optimization or not _generates_convolutions_on_gpu(graph))

    lowering.decide_layout_opt = staticmethod(decide_layout_opt)


def _generates_convolutions_on_gpu(graph: torch.fx.Graph) -> bool:
    """Whether a graph has a convolution on a bp device whose work items run in lockstep, and which has no library."""
    from torch_backplane.planning import LibraryCall, dialect_of

    found = graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    calls = {(node.meta["val"].device, node.meta["val"].dtype) for node in found if "val" in node.meta}
    return any(
        device.type == "bp"
        and drivers.device(device.index).properties.dialect
        and dialect_of(device).target.simt
        and LibraryCall(device, "convolution", dtype).why_not() is not None
        for device, dtype in calls
    )


def scan_whole_lines(ir: ModuleType) -> None:
    """Lets bp scan each line in one kernel, in `torch._inductor.ir`. Inductor divides lines by heuristics of Triton.

    The operators of eager PyTorch, if there are any, scan lines that should be divided.
    """
    create: Callable[..., Any] = ir.Scan.create.__func__  # type: ignore[attr-defined]

    class WholeScan(ir.Scan):  # type: ignore[name-defined, misc]
        @classmethod
        def num_splits(cls, *given: Any, **named: Any) -> Any:
            return ir.ReductionHint.DEFAULT, 1  # type: ignore[attr-defined]

    @functools.wraps(create)
    def create_scan(
        cls: Any,
        device: torch.device,
        dtypes: Any,
        inner_fns: Any,
        size: Any,
        axis: int,
        combine_fn: Any,
        *given: Any,
        can_fallback_to_aten: bool = True,
        **named: Any,
    ) -> Any:
        arguments = (device, dtypes, inner_fns, size, axis, combine_fn, *given)
        if device.type == "bp":
            from torch_backplane.compile.reduction_form import should_divide_scan
            from torch_backplane.planning.launch import dialect_of

            if can_fallback_to_aten and should_divide_scan(dialect_of(device).target, size, axis):
                return [None] * len(dtypes)
            cls = WholeScan
        return create(cls, *arguments, can_fallback_to_aten=can_fallback_to_aten, **named)

    ir.Scan.create = classmethod(create_scan)  # type: ignore[attr-defined]


def sort_short_rows(ir: ModuleType) -> None:
    """Lets bp sort in kernels as many elements as a team can (sorts.py), in `torch._inductor.ir`.

    The operators of eager PyTorch sort more of them. Inductor lets other nodes use the results of an ir.Scan in the
    loop that computes them. It does not for an ir.Sort, for which kernels must have no loops. So a sort is a scan here.
    """
    create: Callable[..., Any] = ir.Sort.create.__func__  # type: ignore[attr-defined]

    @functools.wraps(create)
    def create_sort(
        cls: Any,
        device: torch.device,
        dtypes: Any,
        inner_fns: Any,
        size: Any,
        axis: int,
        stable: bool,
        descending: bool,
        *given: Any,
        **named: Any,
    ) -> Any:
        if device.type != "bp" or _writes_triton():
            return create(cls, device, dtypes, inner_fns, size, axis, stable, descending, *given, **named)
        from torch_backplane.compile.reduction_form import is_sorted_in_kernel
        from torch_backplane.compile.sorts import Order

        if not is_sorted_in_kernel(device, size[axis]):
            return [None] * len(dtypes)
        scan: Any = ir.Scan  # type: ignore[attr-defined]
        return scan.create(device, dtypes, inner_fns, size, axis, Order(descending), can_fallback_to_aten=False)

    ir.Sort.create = classmethod(create_sort)  # type: ignore[attr-defined]


def sort_for_topk(lowering: ModuleType) -> None:
    """Lets topk of bp be the first elements of a sort where kernels sort, in `torch._inductor.lowering`."""
    lowerings: dict[Any, Callable[..., Any]] = lowering.lowerings  # type: ignore[attr-defined]
    sort: Callable[..., Any] = lowering.sort_stable  # type: ignore[attr-defined]
    cut: Callable[..., Any] = lowering.slice_  # type: ignore[attr-defined]
    topk = lowerings[torch.ops.aten.topk.default]

    @functools.wraps(topk)
    def lower_topk(x: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        from torch_backplane.compile.reduction_form import is_sorted_in_kernel

        if not x.get_size() or not is_sorted_in_kernel(x.get_device(), x.get_size()[dim]) or _writes_triton():
            return topk(x, k, dim, largest, sorted)
        return [cut(one, dim, 0, k) for one in sort(x, stable=True, dim=dim, descending=largest)]

    lowerings[torch.ops.aten.topk] = lowerings[torch.ops.aten.topk.default] = lower_topk


def find_statistics_of_softmax_in_one_loop(post_grad: ModuleType) -> None:
    """Lets one loop find the maximum and the sum of a softmax of bp, in `torch._inductor.fx_passes.post_grad`.

    That is for GPUs, for rows whose elements their work items do not keep from one loop to the next (elements.py).
    """
    is_for_triton: Callable[..., bool] = post_grad.prepare_softmax_extra_check  # type: ignore[attr-defined]

    @functools.wraps(is_for_triton)
    def decide(match: Any) -> bool:
        x = match.kwargs["x"].meta["val"]
        if x.device.type != "bp":
            return is_for_triton(match)
        from torch._inductor import config

        from torch_backplane.compile.reduction_form import longest_kept
        from torch_backplane.planning.launch import dialect_of

        if not config.online_softmax or not drivers.device(x.device.index).properties.dialect:
            return False
        if _writes_triton():
            return True
        (dim,) = next(node.args[1] for node in match.nodes if node.target is torch.ops.aten.amax.default)
        target, length = dialect_of(x.device).target, x.shape[dim]
        # Inductor composes it, if the length is dynamic.
        return target.simt and isinstance(length, int) and length > longest_kept(target)

    post_grad.prepare_softmax_extra_check = decide  # type: ignore[attr-defined]


def _writes_triton() -> bool:
    """Whether Inductor's own code generator writes the kernels of bp, instead of GraphKernel."""
    return inductor_backend() == "triton"


def _scheduling() -> type:
    """The class that schedules the kernels of a graph, by the user's choice."""
    if _writes_triton():
        from torch_backplane.compile.triton_scheduling import TritonGraphScheduling

        return TritonGraphScheduling
    from torch_backplane.compile.scheduling import GraphScheduling

    return GraphScheduling


def check_backend(indices: Collection[int]) -> None:
    """Checks that kernels can be generated for a graph's bp devices in the language that the user chose.

    Raises:
        RuntimeError: it is Triton, but a device does not run it, it is not installed, or PyTorch is too old.
    """
    if indices and _writes_triton() and (why := _why_no_triton(indices)):
        raise RuntimeError(
            f'torch.backends.bp.inductor_backend() is "triton", but torch.compile cannot generate Triton kernels: '
            f'{why}. torch.backends.bp.inductor_backend("dialect") generates kernels in the language of the device'
        )


def _why_no_triton(indices: Collection[int]) -> str:
    from torch_backplane.triton_driver.targets import triton_target

    for index in indices:
        try:
            triton_target(index)
        except RuntimeError as error:
            return str(error)
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install triton==3.7.1 installs it"
    if TorchVersion(torch.__version__) < _TORCH_FOR_TRITON:
        return f"it needs PyTorch {_TORCH_FOR_TRITON} or later, but this is {torch.__version__}"
    return ""


def create_backend_without_triton(scheduler: ModuleType) -> None:
    """Lets `torch._inductor.scheduler.Scheduler` serve bp. It requires Triton for every GPU but mps."""
    create_backend: Callable[..., Any] = scheduler.Scheduler.create_backend  # type: ignore[attr-defined]

    @functools.wraps(create_backend)
    def create(self: Any, device: torch.device) -> Any:
        if device.type != "bp":
            return create_backend(self, device)
        from torch._inductor.virtualized import V

        properties = drivers.device(device.index).properties
        if not properties.dialect:
            raise NotImplementedError(
                f"{device} ({properties.name}) has no kernel dialect, so torch.compile generates no kernels for it; "
                'use torch.compile(backend="aot_eager")'
            )
        V.graph.add_device_info(device)
        random_numbers.keep_order(V.graph.operations)
        return _scheduling()(self)

    scheduler.Scheduler.create_backend = create  # type: ignore[attr-defined]


def register(common: ModuleType) -> None:
    """Registers bp in `torch._inductor.codegen.common`."""
    from torch._inductor.custom_graph_pass import CustomGraphModulePass

    class GraphPass(CustomGraphModulePass):
        """Changes what Inductor does not lower for bp. Its identity is part of the key of Inductor's graph cache."""

        def __call__(self, graph: torch.fx.GraphModule) -> None:
            from torch_backplane.compile import flex_lowering

            flex_attention.decompose(graph, keep=flex_lowering.computes_in_one_pass)
            cpu_indices.copy_to_device(graph.graph)

        def uuid(self) -> str:
            return cache_key()

    class DeviceOperations(common.DeviceOpOverrides):  # type: ignore[name-defined]
        """The text of device operations in wrappers."""

        def import_get_raw_stream_as(self, name: str) -> str:
            return f"from torch_backplane.compile.device_interface import stream_number as {name}"

        def set_device(self, device_idx: int) -> str:
            return f"torch.bp.set_device({device_idx})"

        def synchronize(self) -> str:
            return "torch.bp.synchronize()"

        def device_guard(self, device_idx: int) -> str:
            return f"torch.bp.device({device_idx})"

        def current_stream(self) -> str:
            return "torch.bp.current_stream()"

    class Scheduling:
        """Imports the scheduling when it is needed. A class, because Inductor tests which base classes it has."""

        def __new__(cls, scheduler: Any) -> Any:
            return _scheduling()(scheduler)

    class Codegen(common.DeviceCodegen):  # type: ignore[name-defined]
        """What Inductor generates code with. Its choices in lowering depend on whether the kernels are Triton's."""

        @property
        def scheduling(self) -> type:
            return _scheduling() if _writes_triton() else Scheduling

        @scheduling.setter
        def scheduling(self, registered: type) -> None:
            pass

    class Wrapper:
        """Imports the wrapper when a graph is compiled."""

        supports_caching = True

        @staticmethod
        def create(*given: Any) -> Any:
            from torch_backplane.compile.wrapper import GraphWrapper

            return GraphWrapper.create(*given)

    class CppWrapper:
        """Refuses C++ wrappers."""

        supports_caching = False

        @staticmethod
        def create(*given: Any) -> Any:
            raise NotImplementedError(
                "Inductor's C++ wrapper, and thus AOTInductor, does not support bp devices; "
                "use torch.compile, which also compiles the module of an exported program"
            )

    common.register_backend_for_device("bp", Scheduling, Wrapper, CppWrapper, None, GraphPass())
    common.device_codegens["bp"] = Codegen(**vars(common.device_codegens["bp"]))  # releases differ in the fields
    common.register_device_op_overrides("bp", DeviceOperations())


@functools.cache
def _sources() -> str:
    """A hash of the files that generated code depends on."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in ("compile", "kernels", "planning", "triton_driver"):
        for file in sorted((package / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def cache_key() -> str:
    """Identifies this version of Backplane, the preferences that graphs depend on, and the targets of the devices."""
    from torch_backplane.compile.device_interface import BpInterface

    targets = (BpInterface.get_compute_capability(index) for index in range(_C.device_count()))
    return " ".join([_sources(), preferred("attention"), inductor_backend(), *targets])
