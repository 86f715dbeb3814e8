// The loops of quantized.h, written once over the vectors of one instruction set.
//
// The including file defines kLanes, Floats, Ints (of kLanes) and what works on them (see quantized_*_vectors.h), and cores.
// A core multiplies quads: Sum, Weights and Inputs; kBytes, of a prepared quad; kRows and kPairs, the rows and pairs of
// a tile, and kAlone, the pairs for rows that are few (kFew); kGroupPairs, if there are fewer by groups; kSums, that
// stay in registers; weights(at), bytes for kLanes columns; ready(at), Weights as they were stored, where these are no
// vector of bytes; weights_of_nibbles(at, Weights (&)[2]); weights_with<Bits>(at, plane, height, Weights (&)[2]),
// with so many bits of the plane's bytes above each, from that height on; Table, of 16 bytes at an address, and
// weights_of_table(at, Table, Weights (&)[2]), nibbles looked up; inputs(at); start(int32_t); resume(Floats), total's
// bits again, of a core for kW8a8; step(Sum&, Weights, Inputs); total(Sum), which is Ints; put(Ints, at), kLanes
// prepared inputs. A core whose products are added in 16 bits first has Part, which begins as zeros and holds the
// products of kPartNibbles quads of 4 bits, or two of 6; step(Part&, Weights, Inputs); and join(Sum&, Part). Of the
// others Part is Sum. A core with kFlips begins its sums with the magnitudes of a group's negative inputs.
// A pair is two vectors of columns that are 16 columns apart: nibbles of the same bytes.
#pragma once

#include "cpu/kernels/quantized.h"

namespace quintet::cpu {
namespace {

constexpr long kPairColumns = 16;
constexpr long kBlockPairs = kLinearColumns / (2 * kLanes);
constexpr long kByteQuad = kLinearColumns * kQuad;  // bytes of a block's quad: 256, or half of it
constexpr long kLine = 64;  // bytes in a cache line
// Quads that all rows of a panel pass before the next: 64 KiB, or half of it, which a core's second cache holds.
constexpr long kStretch = 256;
constexpr long kReadyRows = 24;   // rows for which weights are taken apart once before all
constexpr long kFewNibbles = 3;   // rows of a tile of few by nibbles in groups and in parts: four leave too few registers
constexpr long kFarAhead = 4096;  // bytes: where few rows ask for weights that are taken apart while they are read

// What shares a scale: a group, one with levels, such as floats for a stretch, or all inputs.
enum class Span { groups, levels, floats, channels };
constexpr bool leveled(Span span) { return span == Span::levels || span == Span::floats; }
// Ready: as a core multiplies them, pair after pair; apart for nibbles, more of which fit a part.
enum class Held { bytes, nibbles, table, fives, sixes, ready, ready_nibbles };
constexpr bool is_ready(Held held) { return held == Held::ready || held == Held::ready_nibbles; }
constexpr long quad_step(Held held) {
    return held == Held::bytes   ? kByteQuad
           : held == Held::fives ? kByteQuad / 8 * 5
           : held == Held::sixes ? kByteQuad / 4 * 3
                                 : kByteQuad / 2;
}
constexpr bool has_plane(Held held) { return held == Held::fives || held == Held::sixes; }
// Where a quad of 6 bits, or two of 5, have those above their nibbles.
constexpr long plane_at(Held held) { return held == Held::fives ? kByteQuad : kByteQuad / 2; }

// ---------------------------------------------------------------------------------------------------------- rows

template <typename Type>
inline Floats numbers(const typename Type::Element* x, long left) {
    if (left >= kLanes) return Type::widen(x);
    typename Type::Element rest[kLanes] = {};
    __builtin_memcpy(rest, x, static_cast<size_t>(left) * sizeof rest[0]);
    return Type::widen(rest);
}

// Magnitudes are compared as whole numbers, where what is not finite lies above all that is: a group that holds such
// becomes zeros with a scale of NaN.
template <typename Type>
inline float peak_of(const typename Type::Element* x, long count) {
    constexpr float kSmallest = 1e-12F;  // all below are taken for zeros: nothing is divided by 0
    Ints most = ints(0);
    for (long i = 0; i < count; i += kLanes) most = larger(most, magnitude_bits(numbers<Type>(x + i, count - i)));
    const uint32_t bits = static_cast<uint32_t>(highest_lane(most));
    float peak;
    __builtin_memcpy(&peak, &bits, sizeof peak);
    return bits >= 0x7F800000U ? __builtin_nanf("") : peak < kSmallest ? kSmallest : peak;
}

template <typename Core>
constexpr bool flips() { return requires { Core::kFlips; }; }

// Bytes from a row's first scale to what its sums start with: after the scales, and with flips after the starts of other cores.
template <typename Core>
constexpr long starts_at(long groups) { return groups * 4 * (flips<Core>() ? 2 : 1); }

template <typename Core, typename Type>
void prepare(const QuantizedRow& row) {
    const auto* x = static_cast<const typename Type::Element*>(row.x);
    uint8_t* at = row.values;
    const long shared = row.span / row.group;  // groups
    float peak = 0.0F;
    for (long g = 0; g < row.groups; ++g) {
        if (g % shared == 0) peak = peak_of<Type>(x, (row.groups - g < shared ? row.groups - g : shared) * row.group);
        const bool finite = peak == peak;
        const Floats stretch = splat(row.largest / peak);
        Ints sum = ints(0);
        [[maybe_unused]] Ints positive = ints(0);
        for (long i = 0; i < row.group; i += kLanes) {
            const Ints whole = finite ? rounded(mul(numbers<Type>(x + i, row.group - i), stretch)) : ints(0);
            sum = add_ints(sum, whole);
            if constexpr (flips<Core>()) positive = add_ints(positive, larger(whole, ints(0)));
            Core::put(whole, at);
            at += kLanes / kQuad * Core::kBytes;
        }
        row.scales[g] = peak / row.largest;
        const int32_t all = sum_of_lanes(sum);
        row.starts[g] = -row.offset * all;
        if constexpr (flips<Core>()) row.starts[row.groups + g] = sum_of_lanes(positive) - all;
        x += row.group;
    }
}

// ------------------------------------------------------------------------------------------------------ products

struct QuantizedTile {
    const QuantizedPanel& panel;
    const uint8_t* weight;  // of this stretch
    long group, quad;       // where the stretch begins: a group, and for kW8a8 a quad of the one that there is
    long groups, quads;     // of the stretch; quads are a group's
    long row, pair;
    const uint8_t* ahead;   // what is asked from memory meanwhile
    const float* scales;    // of the stretch's groups, [groups, kLinearColumns]
};

constexpr long kPairsAside = kPairColumns / kLanes;  // of the same 32 columns

constexpr long first_column(long pair) { return pair / kPairsAside * 2 * kPairColumns + pair % kPairsAside * kLanes; }
// Where a pair's second vector lies, or the first one of the pair after it, seen from a tile's first column.
constexpr long vector_column(long v) { return first_column(v / 2) + v % 2 * kPairColumns; }

// A place in a block's weights: of a pair of columns, and for 5 and 6 bits of the plane's bits that are theirs.
struct Place {
    const uint8_t* at;
    const uint8_t* plane;
    int height;
};

template <typename Core>
constexpr long kReadyPair = 2 * sizeof(typename Core::Weights);

// Bytes from a quad to the next.
template <typename Core, Held H>
constexpr long step_of() { return is_ready(H) ? kBlockPairs * kReadyPair<Core> : quad_step(H); }

// Of the pair, in weights that begin there.
template <typename Core, Held H>
inline Place place_of(const uint8_t* weight, long pair) {
    const long column = first_column(pair), both = column / (2 * kPairColumns), lane = column % kPairColumns;
    if constexpr (is_ready(H)) return {weight + pair * kReadyPair<Core>, nullptr, 0};
    if constexpr (H == Held::bytes) return {weight + column * kQuad, nullptr, 0};
    const int bits = H == Held::sixes ? 4 : 2;  // of a pair, above each other
    return {weight + (both * kPairColumns + lane) * kQuad, weight + plane_at(H) + lane * kQuad, static_cast<int>(both) * bits};
}

// The pair p places further. `All`: the place is the first pair's. `Second`: of two quads of 5 bits.
template <typename Core, Held H, bool All, bool Second = false>
inline void load_pair(const Place& place, const typename Core::Table& table, long p, typename Core::Weights (&w)[2]) {
    const long columns = H == Held::bytes ? first_column(p) : p * kLanes;
    const uint8_t* const at = place.at + (is_ready(H) ? p * kReadyPair<Core> : columns * kQuad);
    if constexpr (is_ready(H) && requires { Core::ready(at); }) {
        w[0] = Core::ready(at);
        w[1] = Core::ready(at + kReadyPair<Core> / 2);
    } else if constexpr (is_ready(H)) {
        w[0] = Core::weights(at);
        w[1] = Core::weights(at + kReadyPair<Core> / 2);
    } else if constexpr (H == Held::nibbles) {
        Core::weights_of_nibbles(at, w);
    } else if constexpr (H == Held::table) {
        Core::weights_of_table(at, table, w);
    } else if constexpr (H == Held::fives) {
        const int height = (All ? 0 : place.height) + (Second ? 4 : 0) + static_cast<int>(p / kPairsAside * 2);
        const uint8_t* const quad = at + (Second ? kByteQuad / 2 : 0);
        Core::template weights_with<1>(quad, place.plane + p % kPairsAside * kLanes * kQuad, height, w);
    } else if constexpr (H == Held::sixes) {
        const int height = (All ? 0 : place.height) + static_cast<int>(p / kPairsAside * 4);
        Core::template weights_with<2>(at, place.plane + p % kPairsAside * kLanes * kQuad, height, w);
    } else {
        w[0] = Core::weights(at);
        w[1] = Core::weights(at + kPairColumns * kQuad);
    }
}

// With each quad, memory is asked for so many lines of what follows; less than 0: of these weights, kFarAhead, a part of them in
// each pass over them. Of several passes one alone would come to what it has just asked for: they ask twice as far ahead.
template <long Lines, long Passes>
inline void ask_ahead([[maybe_unused]] const uint8_t* weights, [[maybe_unused]] long pass,
                      [[maybe_unused]] const uint8_t*& ahead) {
    if constexpr (Lines > 0) {
#pragma GCC unroll 8
        for (long i = 0; i < Lines; ++i) __builtin_prefetch(ahead + i * kLine, 0, 2);
        ahead += Lines * kLine;
    } else if constexpr (Lines < 0) {
        constexpr long kFar = Passes > 1 ? 2 * kFarAhead : kFarAhead;
#pragma GCC unroll 8
        for (long i = 0; i < -Lines; ++i) {
            if (i * Passes / -Lines == pass) __builtin_prefetch(weights + kFar + i * kLine, 0, 3);
        }
    }
}

// Lines that two quads ask for, of as many a quad: less than 0 for all of theirs.
template <Held H, long Lines>
constexpr long two_quads_lines() { return Lines < 0 ? -2 * quad_step(H) / kLine : 2 * Lines; }

template <typename Core, Held H>
inline void pass_quads(Place& w, long count) {
    w.at += count * step_of<Core, H>();
    if constexpr (has_plane(H)) w.plane += count * quad_step(H);
}

// One quad of rows by the pairs from `first` on, added to their sums or parts of these.
template <typename Core, Held H, bool All, bool Second = false, long Rows, long Pairs, typename Added>
inline void add_quad(Added (&sums)[Rows][Pairs][2], long first, const Place& w, const typename Core::Table& table,
                     const uint8_t* x, long stride) {
    typename Core::Weights weights[Pairs][2];
#pragma GCC unroll 4
    for (long p = 0; p < Pairs; ++p) load_pair<Core, H, All, Second>(w, table, first + p, weights[p]);
#pragma GCC unroll 8
    for (long r = 0; r < Rows; ++r) {
        const typename Core::Inputs inputs = Core::inputs(x + r * stride);
#pragma GCC unroll 4
        for (long p = 0; p < Pairs; ++p) {
            Core::step(sums[r][p][0], weights[p][0], inputs);
            Core::step(sums[r][p][1], weights[p][1], inputs);
        }
    }
}

// Two quads, as many as a part holds, one vector of columns after the other.
template <typename Core, Held H, bool All, long Rows, long Pairs>
inline void add_two_quads(typename Core::Sum (&sums)[Rows][Pairs][2], long first, const Place& w,
                          const typename Core::Table& table, const uint8_t* x, long stride) {
    constexpr bool kFives = H == Held::fives;
    Place next = w;
    if constexpr (!kFives) pass_quads<Core, H>(next, 1);
#pragma GCC unroll 4
    for (long p = 0; p < Pairs; ++p) {
        typename Core::Weights weights[2][2];
        load_pair<Core, H, All>(w, table, first + p, weights[0]);
        load_pair<Core, H, All, kFives>(next, table, first + p, weights[1]);
#pragma GCC unroll 8
        for (long r = 0; r < Rows; ++r) {
            const typename Core::Inputs one = Core::inputs(x + r * stride), two = Core::inputs(x + r * stride + Core::kBytes);
#pragma GCC unroll 2
            for (long i = 0; i < 2; ++i) {
                typename Core::Part part{};
                Core::step(part, weights[0][i], one);
                Core::step(part, weights[1][i], two);
                Core::join(sums[r][p][i], part);
            }
        }
    }
}

// Passes of so many pairs over a tile that has all, or its own alone.
template <bool All, long Pairs>
constexpr long passes() { return All ? kBlockPairs / Pairs : 1; }

// So many quads at once, at most as many as a part holds.
template <typename Core, Held H, bool All, long Lines, long Quads, long Rows, long Pairs>
inline __attribute__((always_inline)) void add_part(typename Core::Sum (&sums)[Rows][Pairs][2], long first, Place& w,
                                                    const typename Core::Table& table, const uint8_t*& x, long stride,
                                                    const uint8_t*& ahead) {
    typename Core::Part parts[Rows][Pairs][2] = {};
#pragma GCC unroll 8
    for (long q = 0; q < Quads; ++q, x += Core::kBytes, pass_quads<Core, H>(w, 1)) {
        ask_ahead<Lines, passes<All, Pairs>()>(w.at, first / Pairs, ahead);
        add_quad<Core, H, All>(parts, first, w, table, x, stride);
    }
#pragma GCC unroll 8
    for (long r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
        for (long v = 0; v < 2 * Pairs; ++v) Core::join(sums[r][v / 2][v % 2], parts[r][v / 2][v % 2]);
    }
}

constexpr bool of_four_bits(Held held) { return held == Held::nibbles || held == Held::ready_nibbles; }

template <typename Core>
constexpr bool in_parts() { return !__is_same(typename Core::Part, typename Core::Sum); }

// Pairs whose sums a tile has at once, in registers; those of sixes are joined often.
template <typename Core, Held H, long Rows, long Pairs>
constexpr long at_once() {
    constexpr long most = in_parts<Core>() && !of_four_bits(H) ? 1 : Core::kSums / (2 * Rows);
    return Pairs <= most ? Pairs : most == 3 ? 2 : most;  // which divides the pairs
}

template <typename Core, Held H, bool All, long Lines, long Rows, long Pairs>
inline __attribute__((always_inline)) void grow_parts(typename Core::Sum (&sums)[Rows][Pairs][2], long first, Place w,
                                                      const typename Core::Table& table, const uint8_t* x, long stride, long count,
                                                      const uint8_t*& ahead) {
    constexpr long kMost = Core::kPartNibbles;
    if (count == kMost) return add_part<Core, H, All, Lines, kMost>(sums, first, w, table, x, stride, ahead);
    for (; count >= kMost; count -= kMost) add_part<Core, H, All, Lines, kMost>(sums, first, w, table, x, stride, ahead);
    for (; count > 0; count -= 4) add_part<Core, H, All, Lines, 4>(sums, first, w, table, x, stride, ahead);
}

// `count` quads of rows, at least one, added to their sums; of cores with parts a multiple of 4.
template <typename Core, Held H, bool All, long Lines, long Rows, long Pairs>
inline __attribute__((always_inline)) void grow(typename Core::Sum (&sums)[Rows][Pairs][2], long first, Place w,
                                                const typename Core::Table& table, const uint8_t* x, long stride, long count,
                                                      const uint8_t*& ahead) {
    if constexpr (!in_parts<Core>()) {
        constexpr long kQuads = H == Held::fives ? 2 : 1;
        do {  // a loop that may not run at all costs the compiler registers, and us a third of the speed
            ask_ahead<kQuads == 2 ? two_quads_lines<H, Lines>() : Lines, passes<All, Pairs>()>(w.at, first / Pairs, ahead);
            add_quad<Core, H, All>(sums, first, w, table, x, stride);
            if constexpr (H == Held::fives) {
                x += Core::kBytes;
                add_quad<Core, H, All, true>(sums, first, w, table, x, stride);
            }
            pass_quads<Core, H>(w, kQuads);
            x += Core::kBytes;
        } while (count -= kQuads);
    } else if constexpr (of_four_bits(H)) {
        grow_parts<Core, H, All, Lines>(sums, first, w, table, x, stride, count, ahead);
    } else {
        do {
#pragma GCC unroll 2
            for (long half = 0; half < 2; ++half, pass_quads<Core, H>(w, 2), x += 2 * Core::kBytes) {
                ask_ahead<two_quads_lines<H, Lines>(), passes<All, Pairs>()>(w.at, first / Pairs, ahead);
                add_two_quads<Core, H, All>(sums, first, w, table, x, stride);
            }
        } while (count -= 4);
    }
}

// Numbers of a group with levels: rows of codes for all groups, then of what they are multiples of.
inline Floats unit_at(const QuantizedPanel& panel, const void* levels, long group, long column) {
    const int8_t* const units = static_cast<const int8_t*>(levels) + (panel.groups + (group >> panel.shared) * 2) * kLinearColumns;
    return widen_half(reinterpret_cast<const uint16_t*>(units) + column);
}

inline Floats code_at(const void* levels, long group, long column) {
    return widen_signed(static_cast<const int8_t*>(levels) + group * kLinearColumns + column);
}

inline Floats level_at(const QuantizedPanel& panel, const void* levels, long group, long column) {
    return mul(code_at(levels, group, column), unit_at(panel, levels, group, column));
}

// Asks for what the next block has in the group's place, codes and units.
inline void ask_levels(const QuantizedPanel& panel, const void* levels, long group) {
    const long units = panel.groups >> panel.shared << 1, row = panel.groups + units + group;
    const int8_t* const next = static_cast<const int8_t*>(levels) + row * kLinearColumns;
    __builtin_prefetch(next, 0, 2);
    __builtin_prefetch(next + (panel.groups - group + (group << 1 >> panel.shared)) * kLinearColumns, 0, 2);
}

// Whether other units begin with the group.
inline bool turns(const QuantizedPanel& panel, long group) { return !(group & ((1L << panel.shared) - 1)); }

template <Span S>
inline Floats scale_at(const QuantizedTile& t, const QuantizedPanel& panel, long group, long column) {
    if constexpr (S == Span::levels) return level_at(panel, panel.scales, group, column);
    if constexpr (S == Span::floats) return load(t.scales + (group - t.group) * kLinearColumns + column);
    return widen_half(static_cast<const uint16_t*>(panel.scales) + group * kLinearColumns + column);
}

// The compiler does not know where it points, and adds what is known of it to each address, which costs nothing.
inline float* as_it_is(float* at) {
    __asm__("" : "+r"(at));
    return at;
}

// `Counted`: panel.counted, where that is known while this is compiled: starts would take registers from the sums.
template <typename Core, Held H, Span S, long Rows, long Pairs, long Lines, bool Counted>
__attribute__((noinline)) void tile_of_groups(const QuantizedTile& t) {
    const QuantizedPanel panel = t.panel;  // a copy, which sums that are stored are no part of
    const long column = first_column(t.pair), stride = panel.x_stride, quads = t.quads, last = t.group + t.groups;
    const typename Core::Table table = H == Held::table ? Core::table(panel.table) : typename Core::Table{};
    const uint8_t* const row = panel.x + t.row * stride;
    Place w = place_of<Core, H>(t.weight, t.pair);
    const uint8_t* x = row + t.group * quads * Core::kBytes;
    float* const kept = panel.sums + t.row * kLinearColumns + column;
    const uint8_t* ahead = t.ahead;
    constexpr bool kUnits = S == Span::levels && (Rows <= 2 || in_parts<Core>());  // more rows leave no registers for them
    constexpr bool kUncounted = leveled(S) && !in_parts<Core>();
    constexpr bool kStartsLast = in_parts<Core>() && of_four_bits(H);  // no registers for them while sums grow
    constexpr long kAtOnce = at_once<Core, H, Rows, Pairs>();
    constexpr bool kStay = kAtOnce == Pairs && 4 * Rows * Pairs <= Core::kSums;  // floats have registers, too
    Floats floats[kStay ? Rows : 1][2 * Pairs];
    if constexpr (kStay) {
#pragma GCC unroll 8
        for (long r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
            for (long v = 0; v < 2 * Pairs; ++v) floats[r][v] = load(kept + r * kLinearColumns + vector_column(v));
        }
    }
    Floats units[2 * Pairs] = {};
    for (long g = t.group; g < last; ++g) {
        if (kUnits && (g == t.group || turns(panel, g))) {
#pragma GCC unroll 8
            for (long v = 0; v < 2 * Pairs; ++v) units[v] = unit_at(panel, panel.scales, g, column + vector_column(v));
        }
        const uint8_t* const own = row + panel.scales_at + g * static_cast<long>(sizeof(float));
        int32_t starts[Rows];
        Floats own_scales[Rows];
#pragma GCC unroll 8
        for (long r = 0; r < Rows; ++r) {
            float scale;
            __builtin_memcpy(&scale, own + r * stride, sizeof scale);
            own_scales[r] = splat(scale);
            if constexpr (Counted) {
                starts[r] = 0;
            } else {
                __builtin_memcpy(&starts[r], own + r * stride + starts_at<Core>(panel.groups), sizeof starts[r]);
                if (kUncounted && panel.counted) starts[r] = 0;
            }
        }
#pragma GCC unroll 4
        for (long first = 0; first < Pairs; first += kAtOnce) {
            typename Core::Sum sums[Rows][kAtOnce][2];
#pragma GCC unroll 8
            for (long r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
                for (long v = 0; v < 2 * kAtOnce; ++v) sums[r][v / 2][v % 2] = Core::start(kStartsLast ? 0 : starts[r]);
            }
            grow<Core, H, Pairs == kBlockPairs, Lines>(sums, first, w, table, x, stride, quads, ahead);
            float* const to = as_it_is(kept);
#pragma GCC unroll 8
            for (long v = 0; v < 2 * kAtOnce; ++v) {
                const long aside = vector_column(2 * first + v);
                const Floats scale = kUnits ? mul(code_at(panel.scales, g, column + aside), units[2 * first + v])
                                            : scale_at<S>(t, panel, g, column + aside);
#pragma GCC unroll 8
                for (long r = 0; r < Rows; ++r) {
                    const Ints whole = Core::total(sums[r][v / 2][v % 2]);
                    const Floats total = to_floats(kStartsLast && !Counted ? add_ints(whole, ints(starts[r])) : whole);
                    if constexpr (kStay) {
                        floats[r][v] = fma(total, mul(scale, own_scales[r]), floats[r][v]);
                    } else {
                        float* const at = to + r * kLinearColumns + aside;
                        store(at, fma(total, mul(scale, own_scales[r]), load(at)));
                    }
                }
            }
        }
        if constexpr (S == Span::levels && Lines < 0) {
            ask_levels(panel, panel.scales, g);
            if (panel.mins) ask_levels(panel, panel.mins, g);
        }
        pass_quads<Core, H>(w, quads);
        x += quads * Core::kBytes;
    }
    if constexpr (kStay) {
#pragma GCC unroll 8
        for (long r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
            for (long v = 0; v < 2 * Pairs; ++v) store(kept + r * kLinearColumns + vector_column(v), floats[r][v]);
        }
    }
}

// kW8a8: sums are whole numbers until the last stretch.
template <typename Core, Held H, long Rows, long Pairs, long Lines>
__attribute__((noinline)) void tile_of_channels(const QuantizedTile& t) {
    const QuantizedPanel& panel = t.panel;
    const long column = first_column(t.pair), stride = panel.x_stride;
    const uint8_t* const row = panel.x + t.row * stride;
    float* const kept = panel.sums + t.row * kLinearColumns + column;
    typename Core::Sum sums[Rows][Pairs][2];
#pragma GCC unroll 8
    for (long r = 0; r < Rows; ++r) {
        int32_t start;
        __builtin_memcpy(&start, row + r * stride + panel.scales_at + starts_at<Core>(1), sizeof start);
#pragma GCC unroll 8
        for (long v = 0; v < 2 * Pairs; ++v) {
            const float* const at = kept + r * kLinearColumns + vector_column(v);
            sums[r][v / 2][v % 2] = t.quad == 0 ? Core::start(start) : Core::resume(load(at));
        }
    }
    const uint8_t* ahead = t.ahead;
    grow<Core, H, false, Lines>(sums, 0, place_of<Core, H>(t.weight, t.pair), typename Core::Table{}, row + t.quad * Core::kBytes,
                                stride, t.quads, ahead);
    const bool last = t.quad + t.quads == panel.quads;
    const float* const scales = static_cast<const float*>(panel.scales) + column;
#pragma GCC unroll 8
    for (long v = 0; v < 2 * Pairs; ++v) {
        const Floats scale = load(scales + vector_column(v));
#pragma GCC unroll 8
        for (long r = 0; r < Rows; ++r) {
            float own_scale;
            __builtin_memcpy(&own_scale, row + r * stride + panel.scales_at, sizeof own_scale);
            const Ints total = Core::total(sums[r][v / 2][v % 2]);
            store(kept + r * kLinearColumns + vector_column(v),
                  last ? mul(to_floats(total), mul(scale, splat(own_scale))) : as_floats(total));
        }
    }
}

template <typename Core, Held H, Span S, long Rows, long Pairs, long Lines>
inline void tile(const QuantizedTile& t) {
    if constexpr (S == Span::channels) {
        tile_of_channels<Core, H, Rows, Pairs, Lines>(t);
    } else {
        if constexpr (leveled(S) && in_parts<Core>()) {
            if (t.panel.counted) return tile_of_groups<Core, H, S, Rows, Pairs, Lines, true>(t);
        }
        tile_of_groups<Core, H, S, Rows, Pairs, Lines, false>(t);
    }
}

// What follows a stretch, `bytes` a quad, is asked for by all tiles in turn, a little with each quad: all at once it would
// stand in line, and the products behind it. The processor's own prefetching stops where a stretch ends. Memory drops what it
// has no room to note: where each of several tiles takes several passes, it is asked twice, which pays on AVX2 alone.
struct Asked {
    const uint8_t* next;
    long bytes, count;     // of a quad, and quads
    long tile, tiles;      // 0 tiles: nothing is asked for
};

// A core that reads the block from end to end for few rows.
template <typename Core>
constexpr bool kStreams = Core::kAlone == kBlockPairs;

// Rows that are few: where all inputs are one group, as many as have all their sums in registers.
template <typename Core, Span S>
constexpr long few_rows() {
    constexpr long most = Core::kSums / (2 * Core::kAlone);
    return S == Span::channels && most < Core::kFew ? most : Core::kFew;
}

// Rows of the lowest tile among several, or of the only one.
template <typename Core, Span S, bool Few>
constexpr long least_rows() {
    if (Few || !kStreams<Core>) return 1;
    return few_rows<Core, S>() < Core::kRows / 2 ? few_rows<Core, S>() + 1 : Core::kRows / 2;
}

// Pairs of a tile. A core may have fewer for groups: then their floats stay in registers beside the sums.
template <typename Core, Span S, bool Few>
constexpr long tile_pairs() {
    if constexpr (Few) return Core::kAlone;
    if constexpr (S != Span::channels && requires { Core::kGroupPairs; }) return Core::kGroupPairs;
    return Core::kPairs;
}

template <typename Core, Held H, Span S, bool Few, long Rows>
inline void tiles_of(QuantizedTile t, long rows, const Asked& asked) {
    if constexpr (Rows > least_rows<Core, S, Few>()) {
        if (rows < Rows) return tiles_of<Core, H, S, Few, Rows - 1>(t, rows, asked);
    }
    constexpr long kPairs = tile_pairs<Core, S, Few>(), kPasses = kBlockPairs / kPairs;
    if constexpr (Few && kPasses == 1) {  // the processor asks for bytes in time, but where there is much to multiply
        constexpr bool kInTime = H == Held::bytes && Rows <= 2 && at_once<Core, H, Rows, kPairs>() == kPairs;
        return tile<Core, H, S, Rows, kPairs, kInTime ? 0 : -quad_step(H) / kLine>(t);
    }
    for (long pass = 0; pass < kPasses; ++pass, t.pair += kPairs) {
        const long turn = asked.tile * kPasses + pass, turns = asked.tiles * kPasses, lines = asked.bytes / kLine;
        const long all = kPasses > 1 && asked.tiles > 1 ? 2 * lines : lines;
        const long first = turns ? all * turn / turns : 0, last = turns ? all * (turn + 1) / turns : 0;
        t.ahead = asked.next + (first < lines ? first : first - lines) * kLine * asked.count;
        if constexpr (!Few) {
            if (last - first == 1) {
                tile<Core, H, S, Rows, kPairs, 1>(t);
                continue;
            }
            if (last - first > 1) {
                tile<Core, H, S, Rows, kPairs, 2>(t);
                continue;
            }
        }
        tile<Core, H, S, Rows, kPairs, 0>(t);
    }
}

// One quad as the core multiplies it -> where the next one goes.
template <typename Core, Held H, bool Second>
inline uint8_t* make_quad_ready(const Place& place, const typename Core::Table& table, uint8_t* to) {
#pragma GCC unroll 8
    for (long pair = 0; pair < kBlockPairs; ++pair, to += kReadyPair<Core>) {
        typename Core::Weights weights[2];
        load_pair<Core, H, true, Second>(place, table, pair, weights);
        __builtin_memcpy(to, &weights[0], sizeof weights[0]);
        __builtin_memcpy(to + sizeof weights[0], &weights[1], sizeof weights[1]);
    }
    return to;
}

// Quads as the core multiplies them.
template <typename Core, Held H>
inline void make_ready(const QuantizedPanel& panel, const uint8_t* from, long quads, uint8_t* to) {
    [[maybe_unused]] const typename Core::Table table = H == Held::table ? Core::table(panel.table) : typename Core::Table{};
    constexpr long kQuads = H == Held::fives ? 2 : 1;
    for (Place place = place_of<Core, H>(from, 0); quads > 0; quads -= kQuads, pass_quads<Core, H>(place, kQuads)) {
        to = make_quad_ready<Core, H, false>(place, table, to);
        if constexpr (kQuads == 2) to = make_quad_ready<Core, H, true>(place, table, to);
    }
}

// Scales of groups with levels, [groups, kLinearColumns].
inline void widen_levels(const QuantizedPanel& panel, long first, long groups, float* to) {
    for (long g = first; g < first + groups; ++g) {
        for (long c = 0; c < kLinearColumns; c += kLanes, to += kLanes) store(to, level_at(panel, panel.scales, g, c));
    }
}

// `Ready`: what many rows read is made of what is held once for all of them. So are scales of two levels.
template <typename Core, Held H, Span S, bool Few, bool Ready>
void multiply_as(const QuantizedPanel& panel) {
    constexpr bool kThrees = Few && H == Held::nibbles && S == Span::groups && in_parts<Core>();
    constexpr long kStep = quad_step(H), kMost = kThrees ? kFewNibbles : Few ? few_rows<Core, S>() : Core::kRows;
    constexpr Held kRead = !Ready ? H : H == Held::nibbles && in_parts<Core>() ? Held::ready_nibbles : Held::ready;
    constexpr long kReadBytes = step_of<Core, kRead>(), kWords = kReadBytes > kByteQuad ? kReadBytes / kByteQuad : 1;
    constexpr long kQuads = kStretch / kWords;
    constexpr bool kWidened = S == Span::levels && !Few;
    alignas(64) uint8_t ready[Ready ? kQuads * kReadBytes : 1];
    alignas(64) float scales[kWidened ? kQuads * kQuad / kLeastGroup * kLinearColumns : 1];
    const long tiles = (panel.rows + kMost - 1) / kMost, all = panel.groups * panel.quads;
    constexpr bool kWhole = Few && kStreams<Core>;
    const long least = S == Span::channels ? 1 : panel.quads, wanted = kWhole ? all : kQuads / least * least;
    for (long first = 0; first < all; first += wanted) {
        const long count = all - first < wanted ? all - first : wanted;
        const uint8_t* const weight = panel.weight + first * kStep;
        if constexpr (Ready) make_ready<Core, H>(panel, weight, count, ready);
        if constexpr (kWidened) widen_levels(panel, first / panel.quads, count / panel.quads, scales);
        for (long i = 0; i < tiles; ++i) {  // of nearly the same height, or of three rows and what is left
            const long row = kThrees ? i * kMost : panel.rows * i / tiles;
            const long rows = (kThrees && i + 1 < tiles ? row + kMost : panel.rows * (i + 1) / tiles) - row;
            const bool whole = S == Span::channels;
            const QuantizedTile t{panel, Ready ? ready : weight, whole ? 0 : first / panel.quads, whole ? first : 0,
                                  whole ? 1 : count / panel.quads, whole ? count : panel.quads, row, 0, nullptr, scales};
            const Asked asked{weight + wanted * kStep, kStep, count, i, kWhole ? 0 : tiles};
            tiles_of<Core, kRead, kWidened ? Span::floats : S, Few, kMost>(t, rows, asked);
        }
    }
}

template <typename Core, Held H, Span S>
void multiply(const QuantizedPanel& panel) {
    if constexpr (S == Span::levels || kStreams<Core>) {
        // Two tiles of few rows take less than passes over all columns for one or two rows more.
        constexpr bool kTwice = tile_pairs<Core, S, false>() < Core::kAlone && S != Span::channels;
        constexpr long kMore = !kTwice ? 0 : Core::kRows == Core::kFew ? 2 : S == Span::levels ? 1 : 0;
        if (panel.rows <= few_rows<Core, S>() + kMore) return multiply_as<Core, H, S, true, false>(panel);
    }
    constexpr bool kBytesAsTheyAre = H == Held::bytes && sizeof(typename Core::Weights) == kLanes * kQuad;
    if constexpr (!kBytesAsTheyAre) {
        if (has_plane(H) || panel.rows >= kReadyRows) return multiply_as<Core, H, S, false, true>(panel);
    }
    if constexpr (!has_plane(H)) multiply_as<Core, H, S, false, false>(panel);
}

// ------------------------------------------------------------------------------------------- zero points and minima

// A vector of what is added for each 1 of a row's inputs.
inline Floats added_for(const QuantizedPanel& panel, long group, long column) {
    const long at = group * kLinearColumns + column;
    Floats each = panel.mins ? widen_half(static_cast<const uint16_t*>(panel.mins) + at) : zeros();
    if (panel.zeros) {
        const Floats off = sub(splat(panel.offset), widen_bytes(panel.zeros + at));
        each = fma(off, widen_half(static_cast<const uint16_t*>(panel.scales) + at), each);
    }
    return each;
}

constexpr long kBeginVectors = 4, kBeginRows = kLanes == 16 ? 6 : 2;  // whose sums stay in registers

template <long Rows>
inline void begin_rows(const QuantizedPanel& panel, long row, long column) {
    const float back = -1.0F / panel.offset;  // of a power of two
    Floats sums[Rows][kBeginVectors];
#pragma GCC unroll 8
    for (long r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
        for (long v = 0; v < kBeginVectors; ++v) sums[r][v] = zeros();
    }
    Floats units[kBeginVectors] = {};
    for (long g = 0; g < panel.groups; ++g) {
        if (panel.shared >= 0 && turns(panel, g)) {
#pragma GCC unroll 4
            for (long v = 0; v < kBeginVectors; ++v) units[v] = unit_at(panel, panel.mins, g, column + v * kLanes);
        }
        Floats each[kBeginVectors];
#pragma GCC unroll 4
        for (long v = 0; v < kBeginVectors; ++v) {
            const long at = column + v * kLanes;
            each[v] = panel.shared >= 0 ? mul(code_at(panel.mins, g, at), units[v]) : added_for(panel, g, at);
        }
#pragma GCC unroll 8
        for (long r = 0; r < Rows; ++r) {
            const uint8_t* const own = panel.x + (row + r) * panel.x_stride + panel.scales_at + g * 4;
            float scale;
            int32_t start;  // the sum of the inputs, times the offset, less than 0
            __builtin_memcpy(&scale, own, sizeof scale);
            __builtin_memcpy(&start, own + panel.groups * 4, sizeof start);
            const Floats sum = splat(scale * (static_cast<float>(start) * back));
#pragma GCC unroll 4
            for (long v = 0; v < kBeginVectors; ++v) sums[r][v] = fma(each[v], sum, sums[r][v]);
        }
    }
#pragma GCC unroll 8
    for (long r = 0; r < Rows; ++r) {
        float* const at = panel.sums + (row + r) * kLinearColumns + column;
#pragma GCC unroll 4
        for (long v = 0; v < kBeginVectors; ++v) store(at + v * kLanes, sums[r][v]);
    }
}

constexpr long kBeginMany = 12;    // rows that are
constexpr long kBeginManyRows = kLanes == 16 ? 6 : 3;  // of these, with sums in registers
constexpr long kBeginGroups = 32;  // that many rows pass before the next

// Groups from `first` on, with what is added for each 1 of a row's inputs, [groups, kLinearColumns].
template <long Rows>
inline void begin_rows_by(const QuantizedPanel& panel, long row, long first, long groups, const float* added) {
    const float back = -1.0F / panel.offset;
    alignas(64) float inputs[Rows][kBeginGroups];  // sums of a group's
    for (long r = 0; r < Rows; ++r) {
        const uint8_t* const own = panel.x + (row + r) * panel.x_stride + panel.scales_at + first * 4;
        const float *const scales = reinterpret_cast<const float*>(own), *const starts = scales + panel.groups;
        long g = 0;
        for (; g + kLanes <= groups; g += kLanes) {
            store(inputs[r] + g, mul(load(scales + g), mul(to_floats(as_ints(load(starts + g))), splat(back))));
        }
        for (; g < groups; ++g) {
            int32_t start;
            __builtin_memcpy(&start, starts + g, sizeof start);
            inputs[r][g] = scales[g] * (static_cast<float>(start) * back);
        }
    }
    for (long column = 0; column < kLinearColumns; column += kBeginVectors * kLanes) {
        float* const at = panel.sums + row * kLinearColumns + column;
        Floats sums[Rows][kBeginVectors];
#pragma GCC unroll 8
        for (long r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
            for (long v = 0; v < kBeginVectors; ++v) sums[r][v] = first ? load(at + r * kLinearColumns + v * kLanes) : zeros();
        }
        for (long g = 0; g < groups; ++g) {
            Floats own[Rows];
#pragma GCC unroll 8
            for (long r = 0; r < Rows; ++r) own[r] = splat(inputs[r][g]);
#pragma GCC unroll 4
            for (long v = 0; v < kBeginVectors; ++v) {
                const Floats each = load(added + g * kLinearColumns + column + v * kLanes);
#pragma GCC unroll 8
                for (long r = 0; r < Rows; ++r) sums[r][v] = fma(each, own[r], sums[r][v]);
            }
        }
#pragma GCC unroll 8
        for (long r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
            for (long v = 0; v < kBeginVectors; ++v) store(at + r * kLinearColumns + v * kLanes, sums[r][v]);
        }
    }
}

// What is added is computed once for all rows.
inline void begin_many(const QuantizedPanel& panel) {
    alignas(64) float added[kBeginGroups * kLinearColumns];
    for (long first = 0; first < panel.groups; first += kBeginGroups) {
        const long left = panel.groups - first, groups = left < kBeginGroups ? left : kBeginGroups;
        float* to = added;
        for (long g = first; g < first + groups; ++g) {
            for (long c = 0; c < kLinearColumns; c += kLanes, to += kLanes) {
                store(to, panel.shared >= 0 ? level_at(panel, panel.mins, g, c) : added_for(panel, g, c));
            }
        }
        long row = 0;
        for (; row + kBeginManyRows <= panel.rows; row += kBeginManyRows) {
            begin_rows_by<kBeginManyRows>(panel, row, first, groups, added);
        }
        for (; row < panel.rows; ++row) begin_rows_by<1>(panel, row, first, groups, added);
    }
}

// Before the products, so that their loops are the same for all.
[[maybe_unused]] void begin(const QuantizedPanel& panel) {
    if (!panel.zeros && !panel.mins) {
        __builtin_memset(panel.sums, 0, static_cast<size_t>(panel.rows * kLinearColumns) * sizeof(float));
        return;
    }
    if (panel.rows >= kBeginMany) return begin_many(panel);
    for (long column = 0; column < kLinearColumns; column += kBeginVectors * kLanes) {
        long row = 0;
        for (; row + kBeginRows <= panel.rows; row += kBeginRows) begin_rows<kBeginRows>(panel, row, column);
        for (; row < panel.rows; ++row) begin_rows<1>(panel, row, column);
    }
}

// ------------------------------------------------------------------------------------------------------- results

template <typename Type>
void finish(const QuantizedResult& result) {
    using E = typename Type::Element;
    alignas(64) float bias[kLinearColumns] = {};
    for (long c = 0; result.bias && c < result.columns; c += kLanes) {
        store(bias + c, numbers<Type>(static_cast<const E*>(result.bias) + c, result.columns - c));
    }
    for (long r = 0; r < result.rows; ++r) {
        const float* const sums = result.sums + r * kLinearColumns;
        E* const out = static_cast<E*>(result.out) + r * result.out_stride;
        for (long c = 0; c < result.columns; c += kLanes) {
            const Floats own = result.powers ? mul(load(sums + c), load(result.powers + c)) : load(sums + c);
            const Floats sum = add(own, load(bias + c));
            if (result.columns - c >= kLanes) {
                Type::round(sum, out + c);
            } else {
                E rest[kLanes];
                Type::round(sum, rest);
                __builtin_memcpy(out + c, rest, static_cast<size_t>(result.columns - c) * sizeof(E));
            }
        }
    }
}

template <typename Core>
struct Prepared {
    static constexpr void (*of[kLinearTypes])(const QuantizedRow&) = {prepare<Core, Singles>, prepare<Core, Brains>,
                                                                      prepare<Core, Halves>};
};

template <typename Core>
constexpr void kernels_of(QuantizedKernels& all, QuantizedScheme scheme, void (*multiply)(const QuantizedPanel&)) {
    all.quad_bytes[scheme] = Core::kBytes;
    for (int i = 0; i < kLinearTypes; ++i) all.prepare[scheme][i] = Prepared<Core>::of[i];
    all.multiply[scheme] = multiply;
}

// Of rows in 8 bits. Small: by weights of 4 and 6 bits.
template <typename Narrow, typename Small = Narrow>
constexpr QuantizedKernels kernels_of_bytes() {
    QuantizedKernels all{};
    kernels_of<Narrow>(all, kW8a8, multiply<Narrow, Held::bytes, Span::channels>);
    kernels_of<Small>(all, kW4a8, multiply<Small, Held::nibbles, Span::groups>);
    kernels_of<Narrow>(all, kW8a8Groups, multiply<Narrow, Held::bytes, Span::groups>);
    kernels_of<Narrow>(all, kTable4a8, multiply<Narrow, Held::table, Span::groups>);
    kernels_of<Small>(all, kW4a8Levels, multiply<Small, Held::nibbles, Span::levels>);
    kernels_of<Small>(all, kW6a8Levels, multiply<Small, Held::sixes, Span::levels>);
    kernels_of<Small>(all, kW5a8, multiply<Small, Held::fives, Span::groups>);
    return all;
}

template <typename Wide, typename Narrow, typename Small = Narrow>
constexpr QuantizedKernels quantized_kernels() {
    QuantizedKernels all = kernels_of_bytes<Narrow, Small>();
    kernels_of<Wide>(all, kInt8, multiply<Wide, Held::bytes, Span::groups>);
    kernels_of<Wide>(all, kInt4, multiply<Wide, Held::nibbles, Span::groups>);
    kernels_of<Wide>(all, kTable4, multiply<Wide, Held::table, Span::groups>);
    kernels_of<Wide>(all, kInt4Levels, multiply<Wide, Held::nibbles, Span::levels>);
    kernels_of<Wide>(all, kInt6Levels, multiply<Wide, Held::sixes, Span::levels>);
    kernels_of<Wide>(all, kInt5, multiply<Wide, Held::fives, Span::groups>);
    all.begin = begin;
    all.finish[kLinearFloat32] = finish<Singles>;
    all.finish[kLinearBfloat16] = finish<Brains>;
    all.finish[kLinearFloat16] = finish<Halves>;
    return all;
}

}  // namespace
}  // namespace quintet::cpu
