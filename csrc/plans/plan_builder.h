// Builds dynamic-shape plans from traces in Python.
#pragma once

#include <pybind11/pybind11.h>

#include "plans/dynamic_shape_plan.h"

namespace backplane {

// Returns a PlanBuilder for the call. The call must outlive the builder.
pybind11::object new_plan_builder(PlannedCall& call);
// Takes the finished plan out of the builder and compiles its tape.
DynamicShapePlan finished_plan(const pybind11::object& builder);

} // namespace backplane
