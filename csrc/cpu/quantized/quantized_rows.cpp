#include "cpu/quantized/quantized_rows.h"

#include <algorithm>
#include <cstring>

#include "common/share.h"
#include "cpu/quantized/halves.h"
#include "cpu/kernels/attention_types.h"
#include "cpu/kernels/float8_tables.h"

namespace quintet::cpu {

namespace {

constexpr long kThreadInputs = 16L << 10;  // numbers that are worth another thread's waking
constexpr long kPairColumns = 16;          // between columns that share bytes

// A row of a weight is a column of a block.
struct Column {
    long block, lane;
};

constexpr long rounded_up(long x, long unit) { return (x + unit - 1) / unit * unit; }

// body(t, column) for each token whose row is there; zeros for the others, of so many bytes.
template <typename Call, typename Body>
void for_tokens(const Call& call, long bytes, const Body& body) {
    const long parts = std::max(1L, std::min({call.tokens, static_cast<long>(pool_threads()),
                                              call.tokens * call.inputs / kThreadInputs}));
    share_out(call.tokens, parts, [&](long t) {
        const long row = call.ids[t] - call.first;
        char* const out = static_cast<char*>(call.out) + t * bytes;
        if (row < 0 || row >= call.outputs) {
            std::memset(out, 0, static_cast<size_t>(bytes));
        } else {
            body(out, Column{row / kLinearColumns, row % kLinearColumns});
        }
    });
}

// ---------------------------------------------------------------------------------------------- quantized weights
// How a column's values lie in a block of tiles: a format more is a reader more, and what Scales makes of its groups.

const uint8_t* block_of(const GatherCall& call, Column column) {
    return static_cast<const uint8_t*>(call.weight) + column.block * ((call.inputs + kQuad - 1) / kQuad) * quad_bytes(call.scheme);
}

struct Bytes {
    const uint8_t* at;
    Bytes(const GatherCall& call, Column column) : at(block_of(call, column) + column.lane * kQuad) {}
    int operator()(long k) const { return at[k / kQuad * quad_bytes(kInt8) + k % kQuad]; }
};

template <QuantizedScheme Scheme>
struct LowBits {
    const uint8_t* at;
    long shift;
    LowBits(const GatherCall& call, Column column)
        : at(block_of(call, column) + (column.lane / (2 * kPairColumns) * kPairColumns + column.lane % kPairColumns) * kQuad),
          shift(column.lane / kPairColumns % 2 * 4) {}
    int operator()(long k) const { return at[k / kQuad * quad_bytes(Scheme) + k % kQuad] >> shift & 15; }
};

using Nibbles = LowBits<kInt4>;

struct Sixes : LowBits<kInt6Levels> {
    const uint8_t* above;
    long height;
    Sixes(const GatherCall& call, Column column)
        : LowBits(call, column), above(block_of(call, column) + quad_bytes(kInt4) + column.lane % kPairColumns * kQuad),
          height(column.lane / kPairColumns * 2) {}
    int operator()(long k) const {
        return LowBits::operator()(k) | (above[k / kQuad * quad_bytes(kInt6Levels) + k % kQuad] >> height & 3) << 4;
    }
};

// Two quads have their nibbles one after the other, then a bit above each.
struct Fives {
    const uint8_t* at;
    long shift, plane, height;
    Fives(const GatherCall& call, Column column)
        : at(block_of(call, column)), shift(column.lane / kPairColumns % 2 * 4),
          plane(2 * quad_bytes(kInt4) + column.lane % kPairColumns * kQuad), height(column.lane / kPairColumns) {
        at += (column.lane / (2 * kPairColumns) * kPairColumns + column.lane % kPairColumns) * kQuad;
        plane -= at - block_of(call, column);
    }
    int operator()(long k) const {
        const long second = k / kQuad % 2;
        const uint8_t* const pair = at + k / (2 * kQuad) * 2 * quad_bytes(kInt5) + k % kQuad;
        return (pair[second * quad_bytes(kInt4)] >> shift & 15) | (pair[plane] >> (height + second * 4) & 1) << 4;
    }
};

struct LookedUp : Nibbles {
    const uint8_t* table;
    LookedUp(const GatherCall& call, Column column) : Nibbles(call, column), table(call.table) {}
    int operator()(long k) const { return table[Nibbles::operator()(k)]; }
};

// What a group's values stand for: (value - zero) * scale + minimum.
struct Group {
    float zero, scale, minimum;
};

// Of groups whose scales are numbers by themselves.
struct Scales {
    const GatherCall& call;
    Column column;
    const char* own;  // the block's

    Scales(const GatherCall& c, Column at) : call(c), column(at), own(static_cast<const char*>(c.scales) + at.block * bytes()) {}

    Group operator()(long g) const {
        const long at = g * kLinearColumns + column.lane, all = column.block * call.groups * kLinearColumns + at;
        return {call.zeros ? static_cast<const uint8_t*>(call.zeros)[all] : static_cast<float>(offset_of(call.scheme)), scale(at),
                call.mins ? float_of(static_cast<const uint16_t*>(call.mins)[all]) : -0.0F};  // which changes nothing that it is added to
    }
    float power() const {
        return call.powers ? reinterpret_cast<const float*>(own + held())[column.lane] : 1.0F;
    }

   private:
    long held() const { return call.groups * kLinearColumns * (call.scheme == kW8a8 ? 4 : 2); }
    long bytes() const { return held() + (call.powers ? kLinearColumns * 4 : 0); }
    float scale(long at) const {
        return call.scheme == kW8a8 ? reinterpret_cast<const float*>(own)[at] : float_of(reinterpret_cast<const uint16_t*>(own)[at]);
    }
};

// Of groups whose scales are whole numbers, times what so many of them share.
struct Levels {
    const GatherCall& call;
    Column column;
    long units, bytes;  // of a block

    Levels(const GatherCall& c, Column at)
        : call(c), column(at), units(c.inputs / kLevelInputs), bytes((c.groups + 2 * units) * kLinearColumns) {}

    Group operator()(long g) const {
        const float zero = call.mins ? 0.0F : static_cast<float>(offset_of(call.scheme));
        return {zero, number(call.scales, g), call.mins ? number(call.mins, g) : -0.0F};
    }
    float power() const { return 1.0F; }

   private:
    float number(const void* levels, long g) const {
        const int8_t* const codes = static_cast<const int8_t*>(levels) + column.block * bytes;
        const int8_t* const unit = codes + (call.groups + g * units / call.groups * 2) * kLinearColumns + column.lane * 2;
        uint16_t half;
        std::memcpy(&half, unit, sizeof half);
        return codes[g * kLinearColumns + column.lane] * float_of(half);
    }
};

template <typename Values, typename Groups, typename E>
void row_of(const GatherCall& call, Column column, E* out) {
    const Values values(call, column);
    const Groups scales(call, column);
    const float power = scales.power();
    const long group = call.inputs / call.groups;
    for (long g = 0, k = 0; g < call.groups; ++g) {
        const Group own = scales(g);
        for (const long end = k + group; k < end; ++k) {
            const float number = (static_cast<float>(values(k)) - own.zero) * own.scale + own.minimum;
            narrow(number * power, out + (call.order ? call.order[k] : k));
        }
    }
}

template <typename E>
void quantized_row(const GatherCall& call, Column column, void* out) {
    E* const row = static_cast<E*>(out);
    if (leveled(call.scheme)) {
        (six(call.scheme) ? row_of<Sixes, Levels, E> : row_of<Nibbles, Levels, E>)(call, column, row);
    } else if (looked_up(call.scheme)) {
        row_of<LookedUp, Scales>(call, column, row);
    } else {
        (nibbles(call.scheme) ? row_of<Nibbles, Scales, E>
         : five(call.scheme)  ? row_of<Fives, Scales, E>
                              : row_of<Bytes, Scales, E>)(call, column, row);
    }
}

// ----------------------------------------------------------------------------------------------------- plain ones

// A column of what pack_linear() left: units of `pair` numbers, kLinearColumns units apart.
template <typename Word>
void plain_row(const GatherCall& call, Column column, void* out) {
    const long pair = linear_pair(call.type), each = rounded_up(call.inputs, pair) * kLinearColumns;
    const Word* const from = static_cast<const Word*>(call.weight) + column.block * each + column.lane * pair;
    for (long k = 0; k < call.inputs; ++k) static_cast<Word*>(out)[k] = from[k / pair * kLinearColumns * pair + k % pair];
}

// --------------------------------------------------------------------------------------------------- 8-bit floats

float widened(uint16_t bfloat16) {
    const uint32_t wide = static_cast<uint32_t>(bfloat16) << 16;
    float x;
    std::memcpy(&x, &wide, sizeof x);
    return x;
}

template <typename E>
void float8_row(const Float8GatherCall& call, Column column, void* out) {
    const long groups = (call.inputs + call.group - 1) / call.group;
    const uint8_t* const from = static_cast<const uint8_t*>(call.weight) + column.block * ((call.inputs + 1) / 2) * kFloat8Step +
                                float8_place(column.lane);
    const float* const scales = call.scales + column.block * groups * kLinearColumns + column.lane;
    const Known& known = call.format == kE4m3fn ? kKnown<kE4m3fn> : kKnown<kE5m2>;
    for (long k = 0; k < call.inputs; ++k) {
        const float value = widened(known.bits[from[k / 2 * kFloat8Step + k % 2 * 2]]);
        narrow(value * scales[k / call.group * kLinearColumns], static_cast<E*>(out) + k);
    }
}

long row_bytes(long inputs, LinearType type) { return inputs * (type == kLinearFloat32 ? 4 : 2); }

}  // namespace

void gather(const GatherCall& call) {
    const bool single = call.type == kLinearFloat32;
    const auto row = !call.scales ? (single ? plain_row<uint32_t> : plain_row<uint16_t>)
                     : single     ? quantized_row<float>
                     : call.type == kLinearBfloat16 ? quantized_row<Bfloat16>
                                                    : quantized_row<Float16>;
    for_tokens(call, row_bytes(call.inputs, call.type), [&](void* out, Column column) { row(call, column, out); });
}

void gather_float8(const Float8GatherCall& call) {
    const auto row = call.type == kLinearFloat32    ? float8_row<float>
                     : call.type == kLinearBfloat16 ? float8_row<Bfloat16>
                                                    : float8_row<Float16>;
    for_tokens(call, row_bytes(call.inputs, call.type), [&](void* out, Column column) { row(call, column, out); });
}

}  // namespace quintet::cpu
