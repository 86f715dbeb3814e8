// What several bind_*.cpp hold calls to; std::invalid_argument becomes Python's ValueError.
#pragma once

#include <stdexcept>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/linear/linear.h"
#include "cpu/moe/moe.h"

namespace quintet::cpu {

inline void expect(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

inline LinearType linear_type(int kind) {
    expect(kind >= 0 && kind < kLinearTypes,
           "kind must be 0 (float32), 1 (bfloat16) or 2 (float16), not " + std::to_string(kind));
    return static_cast<LinearType>(kind);
}

// Adapters of experts as Python writes them: addresses and numbers, in the order of the fields; empty: there are none.
inline ExpertsLora experts_lora(const std::vector<long>& f, long experts) {
    if (f.empty()) return {};
    expect(f.size() == 11, "adapters of experts have 11 numbers");
    const auto at = [&](size_t i) { return reinterpret_cast<void*>(static_cast<uintptr_t>(f[i])); };
    expect(f[7] > 0 && f[8] > 0 && f[9] > 0 && f[10] > 0, "slots, parts, rank and stretches must be 1 or more");
    expect(f[7] <= INT32_MAX / experts, "adapters of experts are counted in 32 bits");
    return {.slots = static_cast<const int32_t*>(at(0)),
            .ranks = static_cast<const int32_t*>(at(1)),
            .columns = static_cast<const int32_t*>(at(2)),
            .gate_up_a = at(3),
            .gate_up_b = at(4),
            .down_a = at(5),
            .down_b = at(6),
            .slot_count = f[7],
            .parts = f[8],
            .rank = f[9],
            .stretches = f[10]};
}

}  // namespace quintet::cpu
