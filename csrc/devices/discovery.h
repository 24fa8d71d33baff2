// How the device table asks Python for devices, and the first use of one.
//
// Discovery fills the table; counting the devices needs no more. Initialization comes with the first use of a device: it
// discovers, and runs what was put off until then (torch.manual_seed in a program that has not touched bp yet).
#pragma once

#include <Python.h>

namespace backplane {

// `discover()` adds the devices and calls finish_discovery(). `initialize()` discovers, runs the calls that were put off
// and calls finish_initialization(); it returns at once where it is entered again by the thread that is running it.
void set_discovery_functions(PyObject* discover, PyObject* initialize);
void finish_initialization();

// True after the first use of a device. Starts nothing.
bool is_initialized() noexcept;
// Initializes if that has not happened; throws the reason where device_count() would answer 0.
void ensure_initialized();

} // namespace backplane
