// Discovery and initialization of devices, both implemented in Python.
//
// Discovery fills the table of devices, which is enough to count them. Initialization happens at the first use of a
// device: it runs discovery and the calls deferred until then (such as torch.manual_seed before the program has used
// bp).
#pragma once

#include <Python.h>

namespace backplane {

// `discover()` adds the devices and calls finish_discovery(). `initialize()` runs discovery and the deferred calls,
// then calls finish_initialization(). It returns immediately if the thread that runs it calls it again.
void set_discovery_functions(PyObject* discover, PyObject* initialize);
void finish_initialization();

// True after the first use of a device. Does not initialize.
bool is_initialized() noexcept;
// Initializes if necessary. Throws the reason where device_count() returns 0.
void ensure_initialized();

} // namespace backplane
