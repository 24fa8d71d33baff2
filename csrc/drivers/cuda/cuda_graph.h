// Native graphs of the CUDA driver: the group GRAPHS of a C launcher. The context of the device is current.
#pragma once

#include "drivers/driver_graph.h"

namespace backplane::cuda {

int graph_create(const CCommand* commands, uint64_t count, void** graph);
int graph_update(void* graph, const CCommand* commands, uint64_t count, int* updated);
int graph_launch(void* graph, void* queue);
int graph_destroy(void* graph);

} // namespace backplane::cuda
