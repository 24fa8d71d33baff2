// How the device table asks Python for devices.
#pragma once

#include <Python.h>

namespace backplane {

// `function()` adds the devices and calls finish_discovery(); it is called at most until that has happened.
void set_discover_function(PyObject* function);

// Discovers the devices if that has not happened; throws the reason where device_count() would answer 0.
void ensure_discovered();

} // namespace backplane
