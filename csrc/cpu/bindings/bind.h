// What each bind_*.cpp adds to the module. Tensors come as addresses and sizes: torch is no part of the build.
#pragma once

#include <nanobind/nanobind.h>

namespace quintet::cpu {

void bind_collectives(nanobind::module_& m);
void bind_streams(nanobind::module_& m);
void bind_float8(nanobind::module_& m);
void bind_graph(nanobind::module_& m);
void bind_layers(nanobind::module_& m);
void bind_linear(nanobind::module_& m);
void bind_lora(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_moe_quantized(nanobind::module_& m);
void bind_moe(nanobind::module_& m);
void bind_quantized(nanobind::module_& m);
void bind_quantized_rows(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
void bind_states(nanobind::module_& m);
void bind_suffix_index(nanobind::module_& m);

}  // namespace quintet::cpu
