#pragma once

#include <nanobind/nanobind.h>

// Adds the functions of frame/measure.hpp to the module.
void bind_measure(nanobind::module_& module);
