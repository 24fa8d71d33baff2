// A device of type `maia` for fake tensors: PyTorch's autograd engine starts a thread for it. Loaded by process_facts.py.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::MAIA>;
C10_REGISTER_GUARD_IMPL(MAIA, Guard)

} // namespace
