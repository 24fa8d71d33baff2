"""The names of torch.cuda and torch.backends.cuda whose counterparts on bp have other names, or that have none."""

from __future__ import annotations

# torch.cuda → torch.bp
RENAMED = {
    "CUDAGraph": "Graph",
    "CUDAPluggableAllocator": "PluggableAllocator",
    "DeferredCudaCallError": "DeferredBpCallError",
}

_SPARSE = "bp tensors are strided"
_ARCHITECTURES = "kernels are compiled for the device in use, not for a list of architectures"
_COPIES = "copies between devices for DataParallel, which PyTorch implements only for CUDA"
_CUDA_TYPES = "a type annotation used only within torch.cuda"
_CUDA_LIBRARY = "a handle of a CUDA library"
_CUDA_RUNTIME = "CUDA's runtime and its error codes; errors of drivers are Python exceptions"
_GRAPH_HOOKS = "hooks of CUDA graphs, for tools that read CUDA's nodes and their ids"
_GREEN_CONTEXTS = "splitting one GPU's processors is a feature of CUDA"

# torch.cuda → why torch.bp has nothing like it. "nccl.*" covers all names of a submodule.
ABSENT = {
    "CudaError": _CUDA_RUNTIME,
    "DEVICE_REQUIREMENT": _ARCHITECTURES,
    "DEVICE_REQUIREMENT_POST_JETSON_SBSA_UNIFICATION": _ARCHITECTURES,
    "Device": _CUDA_TYPES,
    "GreenContext": _GREEN_CONTEXTS,
    "PYTORCH_RELEASES_CODE_CC": _ARCHITECTURES,
    **{f"amp.{name}": "torch.bp.amp is a single module" for name in ("autocast_mode", "common", "grad_scaler")},
    "check_error": _CUDA_RUNTIME,
    "comm": _COPIES,
    "comm.*": _COPIES,
    "cudaStatus": _CUDA_RUNTIME,
    "cudart": _CUDA_RUNTIME,
    "current_blas_handle": _CUDA_LIBRARY,
    "current_solver_handle": _CUDA_LIBRARY,
    "export_dot": _GRAPH_HOOKS,
    "export_graph_data": _GRAPH_HOOKS,
    "gds": "GPUDirect Storage is a feature of CUDA",
    "gds.*": "GPUDirect Storage is a feature of CUDA",
    "get_arch_list": _ARCHITECTURES,
    "get_gencode_flags": _ARCHITECTURES,
    "graph_annotations": "annotates CUDA's graph nodes for NVIDIA's profilers",
    "graph_annotations.*": "annotates CUDA's graph nodes for NVIDIA's profilers",
    **{
        f"graphs.register_graph_{event}_hook": _GRAPH_HOOKS
        for event in ("capture_start", "capture_end", "instantiate", "replay_start", "replay_end", "destroy")
    },
    "green_contexts": _GREEN_CONTEXTS,
    "green_contexts.*": _GREEN_CONTEXTS,
    "has_half": "always True in torch.cuda; torch.bp.get_device_properties().dtypes lists the dtypes of each device",
    "has_magma": "MAGMA is a library for CUDA",
    "jiterator": "kernels written in CUDA C++",
    "jiterator.*": "kernels written in CUDA C++",
    "nccl": "NCCL is a library for CUDA",
    "nccl.*": "NCCL is a library for CUDA",
    "profiler": "controls NVIDIA's profilers; torch.profiler covers bp",
    "profiler.*": "controls NVIDIA's profilers; torch.profiler covers bp",
    "sparse": _SPARSE,
    "sparse.*": _SPARSE,
    **{
        f"tunable.{verb}_cublaslt_requested_algo_count": "eight algorithms of cuBLASLt are candidates"
        for verb in ("get", "set")
    },
}

# torch.backends.cuda → torch.backends.bp
RENAMED_BACKENDS = {
    "cublas_workspace_size": "blas_workspace_size",
    "cublaslt_workspace_size": "blas_workspace_size",
    "cufft_plan_cache": "fft_plan_cache",
}

# PyTorch's own functions, which select among the implementations of attention on every device.
KEPT_BACKENDS = (
    "can_use_cudnn_attention", "can_use_efficient_attention", "enable_mem_efficient_sdp", "mem_efficient_sdp_enabled",
    "sdp_kernel",
)  # fmt: skip

ABSENT_BACKENDS = dict.fromkeys(("is_ck_sdpa_available", "preferred_rocm_fa_library"), "for AMD's libraries")


def why_absent(name: str) -> str:
    """Why torch.bp has no counterpart of a name of torch.cuda, such as "cudart" or "nccl.version"; "" if unknown."""
    return ABSENT.get(name) or ABSENT.get(f"{name.rpartition('.')[0]}.*") or ""
