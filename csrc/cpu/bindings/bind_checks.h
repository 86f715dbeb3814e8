// What several bind_*.cpp hold calls to; std::invalid_argument becomes Python's ValueError.
#pragma once

#include <stdexcept>
#include <string>

#include "cpu/linear/linear.h"

namespace quintet::cpu {

inline void expect(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

inline LinearType linear_type(int kind) {
    expect(kind >= 0 && kind < kLinearTypes,
           "kind must be 0 (float32), 1 (bfloat16) or 2 (float16), not " + std::to_string(kind));
    return static_cast<LinearType>(kind);
}

}  // namespace quintet::cpu
