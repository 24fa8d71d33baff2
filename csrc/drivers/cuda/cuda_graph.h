// Native graphs of the CUDA driver: the groups GRAPHS and CAPTURES of a C launcher. The context of the device is
// current.
#pragma once

#include "drivers/driver_graph.h"

namespace backplane::cuda {

int graph_create(const CCommand* commands, uint64_t count, void** graph);
int graph_update(void* graph, const CCommand* commands, uint64_t count, int* updated);
int graph_launch(void* graph, void* queue);
int graph_destroy(void* graph);

int begin_capture(void** queue);
int end_capture(void* queue, void** captured);
int destroy_captured(void* captured);

} // namespace backplane::cuda
