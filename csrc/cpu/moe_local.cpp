// Which of a token's experts are this rank's, and how often each is asked for: see quintet/ops/moe.py.
#include <cstring>

#include "cpu/moe.h"

namespace quintet::cpu {

namespace {

constexpr uint64_t kBits = 0xFFFFFF, kMix = 0x9E3779B1;
constexpr int kShift = 20;

template <typename Bits>
int64_t sum_of_bits(const void* x, long seen) {
    Bits numbers[4];
    std::memcpy(numbers, x, static_cast<size_t>(seen) * sizeof(Bits));
    int64_t sum = 0;
    for (long i = 0; i < seen; ++i) sum += numbers[i];
    return sum;
}

long column_of(const LocalCall& call, long token) {
    if (call.columns == 1) return 0;
    const void* const x = static_cast<const char*>(call.x) + token * call.x_stride * call.size;
    const int64_t sum = call.size == 4 ? sum_of_bits<int32_t>(x, call.seen) : sum_of_bits<int16_t>(x, call.seen);
    return static_cast<long>(((static_cast<uint64_t>(sum) & kBits) * kMix >> kShift) % static_cast<uint64_t>(call.columns));
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
