// What writes plans for any shape, for planners in Python.
#pragma once

#include <pybind11/pybind11.h>

#include "plans/any_shape_plan.h"

namespace backplane {

// For this call, which outlives it.
pybind11::object new_plan_builder(PlannedCall& call);
AnyShapePlan finished_plan(const pybind11::object& builder);

} // namespace backplane
