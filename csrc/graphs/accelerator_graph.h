// torch.accelerator.Graph on bp.
#pragma once

namespace backplane {

// To be called once, when the device type has its name: PyTorch looks graphs up by it.
void register_accelerator_graph();

} // namespace backplane
