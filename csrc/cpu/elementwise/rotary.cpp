#include "cpu/elementwise/rotary.h"

#include <stdexcept>
#include <string>

#include "cpu/rows.h"

namespace quintet::cpu {

void rotary(const RotaryCall& call) {
    for (long token = 0; token < call.tokens; ++token) {
        const int position = call.positions[token];
        if (position >= 0 && position < call.positions_there) continue;
        throw std::invalid_argument("position " + std::to_string(position) + " is outside of the rotary table, which has " +
                                    std::to_string(call.positions_there) + " rows");
    }
    const auto kernel = QUINTET_KERNELS(kRotary).turn[call.type];
    const long bytes = (call.heads[0].count + call.heads[1].count) * call.dim * size_of(call.type);
    for_rows(call.tokens, bytes, [&](long first, long last) { kernel(call, first, last); });
}

}  // namespace quintet::cpu
