"""Maps every public name of torch.cuda to its state in torch.bp.

States: «same» (same name and signature), «renamed», «refused» (same name and signature, raises NotImplementedError with
the reason), «absent». A name in a submodule has a dot ("nvtx.mark"). "nvtx.*" covers all names of a submodule. Without
such an entry, a name in a submodule has the state of the plain name: "memory.empty_cache" that of "empty_cache".

`python tests/support/cuda_parity.py` prints the sentence for docs/torch-bp.md.
"""

from __future__ import annotations

import importlib
import pkgutil
import types
from collections import Counter
from typing import NamedTuple

import torch

from torch_backplane.as_cuda.names import ABSENT, RENAMED

# The release of torch that the table describes; others can lack some of its names.
REFERENCE_RELEASE = "2.13"

# Names and parameters that torch.cuda has since a later release than the reference. torch.bp has the parameters with
# every release.
LATER_NAMES = """
    DEVICE_REQUIREMENT_POST_JETSON_SBSA_UNIFICATION export_dot export_graph_data graph_annotations
    graphs.register_graph_capture_end_hook graphs.register_graph_capture_start_hook graphs.register_graph_destroy_hook
    graphs.register_graph_instantiate_hook graphs.register_graph_replay_end_hook graphs.register_graph_replay_start_hook
    tunable.get_cublaslt_requested_algo_count tunable.set_cublaslt_requested_algo_count
""".split()  # noqa: SIM905
LATER_PARAMETERS = {
    "_record_memory_history": {"record_pinned_host_memory", "record_cuda"},
    "make_graphed_callables": {"capture_error_mode", "enable_annotations"},
}


class Verdict(NamedTuple):
    kind: str  # same, renamed, refused or absent
    note: str = ""  # renamed: the new name; refused and absent: the reason


_LEGACY_DTYPES = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")

SAME = """
    AcceleratorError ComplexDoubleStorage ComplexFloatStorage Event ExternalStream MemPool OutOfMemoryError Stream
    StreamContext amp amp.GradScaler amp.amp_definitely_not_available amp.autocast amp.custom_bwd amp.custom_fwd
    caching_allocator_alloc caching_allocator_delete caching_allocator_disabled caching_allocator_enable
    can_device_access_peer change_current_allocator clock_rate current_device current_stream default_generators
    default_stream device device_count device_memory_used device_of empty_cache
    get_allocator_backend get_device_capability get_device_name get_device_properties get_per_process_memory_fraction
    get_rng_state get_rng_state_all get_stream_from_external get_sync_debug_mode graph graph_pool_handle graphs
    host_memory_stats host_memory_stats_as_nested_dict init
    initial_seed ipc_collect is_available is_bf16_supported is_current_stream_capturing is_initialized is_tf32_supported
    make_graphed_callables manual_seed manual_seed_all
    max_memory_allocated max_memory_cached max_memory_reserved mem_get_info memory memory_allocated memory_cached
    memory_reserved memory_snapshot memory_stats memory_stats_as_nested_dict memory_summary memory_usage
    nvtx nvtx.mark nvtx.range
    nvtx.range_end nvtx.range_pop nvtx.range_push nvtx.range_start power_draw random
    reset_accumulated_host_memory_stats reset_accumulated_memory_stats reset_max_memory_allocated
    reset_max_memory_cached reset_peak_host_memory_stats reset_peak_memory_stats seed seed_all set_device
    set_per_process_memory_fraction set_rng_state set_rng_state_all set_stream set_sync_debug_mode stream streams
    synchronize temperature tunable use_mem_pool utilization
""".split()  # noqa: SIM905 - eighty quoted names would be harder to read
SAME += """
    tunable.enable tunable.get_filename tunable.get_max_tuning_duration tunable.get_max_tuning_iterations
    tunable.get_results tunable.get_rotating_buffer_size tunable.get_validators tunable.is_enabled
    tunable.mgpu_tune_gemm_in_file tunable.read_file tunable.record_untuned_enable tunable.record_untuned_is_enabled
    tunable.set_filename tunable.set_max_tuning_duration tunable.set_max_tuning_iterations
    tunable.set_numerical_check_tolerances tunable.set_rotating_buffer_size tunable.tune_gemm_in_file
    tunable.tuning_enable tunable.tuning_is_enabled
""".split()  # noqa: SIM905
SAME += [f"{dtype}{kind}" for dtype in _LEGACY_DTYPES for kind in ("Storage", "Tensor")]

REFUSED = {
    "list_gpu_processes": "drivers see only their own process",
}

TABLE = (
    {name: Verdict("same") for name in SAME}
    | {name: Verdict("renamed", new) for name, new in RENAMED.items()}
    | {name: Verdict("refused", reason) for name, reason in REFUSED.items()}
    | {name: Verdict("absent", reason) for name, reason in ABSENT.items()}
)


def verdict(name: str) -> Verdict | None:
    """Returns the entry for a name of torch.cuda, such as "Stream" or "nvtx.mark"; None if there is no entry."""
    module, _, plain = name.rpartition(".")
    return TABLE.get(name) or TABLE.get(f"{module}.*") or TABLE.get(plain)


def names_of(module: types.ModuleType) -> set[str]:
    """Returns the public names of torch.cuda or a submodule, without those imported from other packages."""
    names = set(getattr(module, "__all__", ()))
    for name in dir(module):
        value = getattr(module, name)
        if isinstance(value, types.ModuleType):
            own = value.__name__.startswith("torch.cuda.")
        else:
            # Constants have no __module__. It is "torch" for exceptions and "types" for a union type of an annotation.
            home = getattr(value, "__module__", None) or module.__name__
            own = home.startswith(module.__name__) or (home in ("torch", "types") and value is not torch.Tensor)
        if own and not name.startswith("_") and name != "TYPE_CHECKING":
            names.add(name)
    return names


def cuda_names() -> list[str]:
    """Returns every public name of torch.cuda and its submodules (with a dot), sorted."""
    names = names_of(torch.cuda)
    for info in pkgutil.iter_modules(torch.cuda.__path__):
        if not info.name.startswith("_"):
            submodule = importlib.import_module(f"torch.cuda.{info.name}")
            names |= {info.name} | {f"{info.name}.{name}" for name in names_of(submodule)}
    return sorted(names)


def sentence() -> str:
    """Returns the sentence of docs/torch-bp.md that summarizes the table."""
    verdicts = [verdict(name) for name in cuda_names()]
    counts = Counter(found.kind for found in verdicts if found)
    return (
        f"Of torch.cuda's {len(verdicts)} public names (submodules included), torch.bp has {counts['same']} with the "
        f"same signature and {counts['renamed']} under another name; {counts['refused']} exist and raise "
        f"NotImplementedError with the reason; {counts['absent']} are absent, each for a reason that "
        "`tests/support/cuda_parity.py` gives."
    )


if __name__ == "__main__":
    print(sentence())
