// The runtime's view of a device that a Python driver brought: an adapter around torch_backplane.drivers.base.Device.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "devices/device.h"

namespace backplane {

// `index` is the number that the device will have; `discrete`: the host must not see its memory, even where it could.
std::unique_ptr<Device> make_driver_device(
    c10::DeviceIndex index, DeviceProperties properties, pybind11::object device, bool discrete);

} // namespace backplane
