// Which devices have attention in one pass (torch_backplane/operators/attention.py).
#pragma once

#include <c10/core/Device.h>

namespace backplane {

void set_one_pass_attention(c10::DeviceIndex device, bool has_it);

} // namespace backplane
