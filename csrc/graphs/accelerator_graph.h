// torch.accelerator.Graph on bp.
#pragma once

namespace backplane {

// Call once, after the device type has been renamed: PyTorch looks graphs up by its name.
void register_accelerator_graph();

} // namespace backplane
