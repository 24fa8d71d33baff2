// PyTorch's composite operators that read their operands' memory on the host, whatever the device is. They use the CPU
// fallback instead.
#include <torch/library.h>

#include "fallback/fallback.h"

namespace backplane {
namespace {

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name :
       {"_reshape_from_tensor", "_saturate_weight_to_fp16", "_sobol_engine_draw", "_sobol_engine_ff_",
        "_sobol_engine_initialize_state_", "_sobol_engine_scramble_", "choose_qparams_optimized",
        "fbgemm_linear_quantize_weight", "fbgemm_pack_gemm_matrix_fp16", "fbgemm_pack_quantized_matrix",
        "fbgemm_pack_quantized_matrix.KN"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cpu_fallback>());
  }
}

} // namespace
} // namespace backplane
