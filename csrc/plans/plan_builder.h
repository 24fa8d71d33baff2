// What writes dynamic-shape plans, for planners in Python.
#pragma once

#include <pybind11/pybind11.h>

#include "plans/dynamic_shape_plan.h"

namespace backplane {

// For this call, which outlives it.
pybind11::object new_plan_builder(PlannedCall& call);
DynamicShapePlan finished_plan(const pybind11::object& builder);

} // namespace backplane
