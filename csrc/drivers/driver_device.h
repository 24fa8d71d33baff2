// The adapter that makes a Python driver's device (torch_backplane.drivers.base.Device) a Device of the runtime.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "devices/device.h"

namespace backplane {

// `index`: the index that the device will have. `discrete`: hide its memory from the host, even if it is accessible.
std::unique_ptr<Device> make_driver_device(
    c10::DeviceIndex index, DeviceProperties properties, pybind11::object device, bool discrete);

} // namespace backplane
