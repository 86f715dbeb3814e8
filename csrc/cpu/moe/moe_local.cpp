// Which of a token's experts are this rank's, and how often each is asked for: see quintet/ops/moe.py.
#include <bit>

#include "cpu/quantized/halves.h"
#include "cpu/moe/moe.h"

namespace quintet::cpu {

namespace {

constexpr uint64_t kBits = 0xFFFFFF, kMix = 0x9E3779B1;
constexpr int kLow = 8, kShift = 20;

long column_of(const LocalCall& call, long token) {
    if (call.columns == 1) return 0;
    int64_t sum = 0;
    for (long i = token * call.x_stride; i < token * call.x_stride + call.seen; ++i) {
        const float x = call.type == FloatType::float32 ? static_cast<const float*>(call.x)[i]
                                                        : widened(static_cast<const uint16_t*>(call.x)[i], call.type);
        sum += std::bit_cast<int32_t>(x);
    }
    const uint64_t mixed = (static_cast<uint64_t>(sum >> kLow) & kBits) * kMix >> kShift;
    return static_cast<long>(mixed % static_cast<uint64_t>(call.columns));
}

}  // namespace

void local_experts(const LocalCall& call) {
    for (long token = 0; token < call.tokens; ++token) {
        const long column = column_of(call, token);
        for (long at = token * call.k; at < (token + 1) * call.k; ++at) {
            const long id = call.ids[at];
            call.out[at] = id >= 0 && id < call.experts ? call.places[id * call.columns + column] : -1;
        }
    }
}

void count_experts(const CountCall& call) {
    for (long i = 0; i < call.count; ++i) {
        const int32_t id = call.ids[i];
        if (id < 0 || id >= call.experts) continue;
        call.loads[id] = static_cast<int32_t>(static_cast<uint32_t>(call.loads[id]) + 1U);  // around its end
    }
}

}  // namespace quintet::cpu
