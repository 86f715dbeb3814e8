// Attention of bfloat16 in AMX's tiles: 16 rows by the 64 positions of a block, then by the numbers of V, 16 at a time.
// Needs what attention_body.h says under QUINTET_DOT.
//
// V is interleaved as for many rows in attention_pairs.h, whose weights these are, too; many rows are multiplied with K as
// it is turned there. What few rows read is turned itself, and K taken as it stands, so that the product comes out on its
// side. Every number of a tile adds up its inputs 32 at a time, in order, whatever rows stand beside it, and is the same
// on either side. Positions that a row does not see have weights of 0, as in attention_pairs.h.
#pragma once

#include "cpu/kernels/attention_pairs.h"
#include "cpu/kernels/tiles.h"

namespace quintet::cpu {
namespace {

constexpr long kTileRows = 16, kTileInputs = 32, kTilePairs = kTileInputs / 2;
constexpr long kHalves = kAttentionBlock / kTileInputs;  // of a block's positions

// Rows up to which K is not turned for them. With 2 rows and 2,048 positions turning it takes 1.4 times as long.
constexpr long kFewTileRows = kTileRows;

// Tiles 0 to 3 are sums of so many rows, 4 and 5 rows of a left side, 6 and 7 pairs of a right one.
inline void configure(long rows) {
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
        config.rows[i] = static_cast<uint8_t>(i < 6 ? rows : kTilePairs);
        config.row_bytes[i] = 64;
    }
    configure_tiles(config);
}

// body(row) for rows that fill tiles, and for those that are left.
template <typename Body>
inline void by_tiles(long rows, const Body& body) {
    const long whole = rows / kTileRows * kTileRows;
    if (whole) configure(kTileRows);
    for (long r = 0; r < whole; r += kTileRows) body(r);
    if (whole == rows) return;
    configure(rows - whole);
    body(whole);
}

// ------------------------------------------------------------------------------------------------------ scores

template <int Sum>
inline void score_tile_at(const Bfloat16* k, long width, Range columns) {
    constexpr int kRight = 6 + Sum % 2;
    if (Sum * kLanes < columns.first || Sum * kLanes >= columns.last) return;
    load_tile<kRight>(k + Sum * kLanes * width, width * 2);
    multiply_tiles<Sum, 4, kRight>();
}

template <int Sum>
inline void keep_scores(Range columns, float* scores) {
    if (Sum * kLanes < columns.first || Sum * kLanes >= columns.last) return;
    store_tile<Sum>(scores + Sum * kLanes, kAttentionBlock * 4);
}

// Of up to 16 rows, with what turn_keys() made; columns outside `span` stay what they are.
inline void score_tiles(const Bfloat16* q, const Bfloat16* k, long width, Range span, float* scores) {
    const Range columns = {span.first / kLanes * kLanes, span.last};
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
    for (long i = 0; i < width; i += kTileInputs) {
        load_tile<4>(q + i, width * 2);
        score_tile_at<0>(k + i, width, columns);
        score_tile_at<1>(k + i, width, columns);
        score_tile_at<2>(k + i, width, columns);
        score_tile_at<3>(k + i, width, columns);
    }
    keep_scores<0>(columns, scores);
    keep_scores<1>(columns, scores);
    keep_scores<2>(columns, scores);
    keep_scores<3>(columns, scores);
}

// The queries of up to 16 rows as turn_keys() would make them, with zeros for the rows that are missing.
inline void turn_queries(const Bfloat16* q, long rows, long width, const Bfloat16* zeros, Bfloat16* to) {
    const Bfloat16* from[kTileRows];
    for (long r = 0; r < kTileRows; ++r) from[r] = r < rows ? q + r * width : zeros;
    for (long i = 0; i < width; i += kTileInputs) turn(from, i, to + i, width);
}

// Sixteen rows of K as a tile reads them: where they stand, if one behind the other, or as a copy.
inline const Bfloat16* in_a_row(const Bfloat16* const* k, long width, Bfloat16* copy, long& stride) {
    stride = k[1] - k[0];
    bool even = true;
    for (long i = 2; i < kTileRows; ++i) even &= k[i] - k[i - 1] == stride;
    if (even) return k[0];
    for (long i = 0; i < kTileRows; ++i) __builtin_memcpy(copy + i * width, k[i], static_cast<size_t>(width) * 2);
    stride = width;
    return copy;
}

// Sixteen positions by up to 16 rows: [positions][rows] become `rows` rows of scores.
inline void turn_scores(const float* sums, long rows, float* scores) {
    alignas(64) float turned[kTileRows * kTileRows];
    const Bfloat16* from[kTileRows];
    for (long i = 0; i < kTileRows; ++i) from[i] = reinterpret_cast<const Bfloat16*>(sums + i * kTileRows);
    turn(from, 0, reinterpret_cast<Bfloat16*>(turned), 2 * kTileRows);
    for (long r = 0; r < rows; ++r) store(scores + r * kAttentionBlock, load(turned + r * kTileRows));
}

// As score_tiles(), with K where it stands. `scratch`: [2 * kTileRows, width].
__attribute__((noinline)) void score_few(const Bfloat16* q, long rows, const Bfloat16* const* k, long width, Range span,
                                         Scratch& s, const Bfloat16* const* ahead, Bfloat16* scratch) {
    alignas(64) float sums[kTileRows * kTileRows];
    if (!s.turned) turn_queries(q, rows, width, reinterpret_cast<const Bfloat16*>(s.zeros), scratch);
    s.turned = true;
    configure(kTileRows);
    for (long c = span.first / kLanes * kLanes; c < span.last; c += kLanes) {
        for (long i = 0; ahead && i < kLanes; ++i) fetch(ahead[c + i], width);
        long stride = 0;
        const Bfloat16* const keys = in_a_row(k + c, width, scratch + kTileRows * width, stride);
        zero_tile<0>();
        for (long i = 0; i < width; i += kTileInputs) {
            load_tile<4>(keys + i, stride * 2);
            load_tile<6>(scratch + i, width * 2);
            multiply_tiles<0, 4, 6>();
        }
        store_tile<0>(sums, kTileRows * 4);
        turn_scores(sums, rows, s.scores + c);
    }
}

// ------------------------------------------------------------------------------------------------------ values

// The halves of a block that hold something of `span`.
inline Range halves_of(Range span) {
    return {span.first / kTileInputs, (span.last + kTileInputs - 1) / kTileInputs};
}

// Interleaves V as pack_values() does, with zeros where a half holds what is not in `span`.
__attribute__((noinline)) void pack_halves(const Scratch& s, const Bfloat16* const* v, long width, Range span,
                                           const Bfloat16* const* ahead, Bfloat16* packed) {
    const Range halves = halves_of(span);
    const size_t bytes = static_cast<size_t>(width) * 4;  // of a pair of positions
    pack_values(s, v, width, span, ahead, packed);
    for (long pair = halves.first * kTilePairs; pair < span.first / 2; ++pair) {
        __builtin_memset(packed + 2 * pair * width, 0, bytes);
    }
    for (long pair = (span.last + 1) / 2; pair < halves.last * kTilePairs; ++pair) {
        __builtin_memset(packed + 2 * pair * width, 0, bytes);
    }
}

// What came before, relative to the largest score so far.
inline void shrink_rows(const float* shrink, long rows, long width, long stride, float* acc) {
    for (long r = 0; r < rows; ++r) {
        if (shrink[r] == 1.0F) continue;
        for (long i = 0; i < width; i += kLanes) {
            store(acc + r * stride + i, load(acc + r * stride + i) * splat(shrink[r]));
        }
    }
}

template <int Sum>
inline void value_tile_at(const Bfloat16* packed, long at, Widths widths, Range halves, float* acc) {
    load_tile<Sum>(acc + at, widths.k * 4);
    if (halves.first == 0) {
        load_tile<6>(packed + 2 * at, widths.v * 4);
        multiply_tiles<Sum, 4, 6>();
    }
    if (halves.last == kHalves) {
        load_tile<7>(packed + 2 * (kTilePairs * widths.v + at), widths.v * 4);
        multiply_tiles<Sum, 5, 7>();
    }
    store_tile<Sum>(acc + at, widths.k * 4);
}

// acc += weights @ v for up to 16 rows.
inline void value_tiles(const Bfloat16* weights, const Bfloat16* packed, Widths widths, Range halves, float* acc) {
    static_assert(kHalves == 2);
    if (halves.first == 0) load_tile<4>(weights, kAttentionBlock * 2);
    if (halves.last == kHalves) load_tile<5>(weights + kTileInputs, kAttentionBlock * 2);
    for (long at = 0; at < widths.v; at += 2 * kLanes) {
        value_tile_at<0>(packed, at, widths, halves, acc);
        value_tile_at<1>(packed, at + kLanes, widths, halves, acc);
    }
}

inline void add_tiles(const Scratch& s, long first, long rows, const Bfloat16* packed, Widths widths) {
    by_tiles(rows, [&](long row) {
        const long at = first + row, count = rows - row < kTileRows ? rows - row : kTileRows;
        Range seen = {kAttentionBlock, 0};
        for (long r = 0; r < count; r += 4) {
            const Range some = seen_by(s.seen + at + r, count - r < 4 ? count - r : 4);
            seen.first = some.first < seen.first ? some.first : seen.first;
            seen.last = some.last > seen.last ? some.last : seen.last;
        }
        if (seen.first >= seen.last) return;
        float* const acc = s.now.acc + at * widths.k;
        shrink_rows(s.shrink + at, count, widths.v, widths.k, acc);
        value_tiles(s.weights + at * kAttentionBlock, packed, widths, halves_of(seen), acc);
    });
}

// Where V holds what is not finite, each row is multiplied with what it sees alone.
__attribute__((noinline)) void add_apart(const Scratch& s, long rows, const Bfloat16* const* v, Widths widths,
                                         Bfloat16* packed) {
    for (long r = 0, together = 0; r < rows; r += together) {
        together = alike(s.seen + r, rows - r);
        if (s.seen[r].first >= s.seen[r].last) continue;
        pack_halves(s, v, widths.v, s.seen[r], nullptr, packed);
        add_tiles(s, r, together, packed, widths);
    }
}

// ------------------------------------------------------------------------------------------------------- block

// As take_pairs().
inline void take_tiles(const AttentionCall& call, long rows, long width, const Bfloat16* const* k,
                       const Bfloat16* const* v, Range span, const Bfloat16* const* ahead, Scratch& s) {
    if (span.first >= span.last) return;
    const Bfloat16* const q = reinterpret_cast<const Bfloat16*>(s.q);
    Bfloat16 *const turned = reinterpret_cast<Bfloat16*>(s.k), *const packed = reinterpret_cast<Bfloat16*>(s.v);
    const Widths widths = {width, (call.value_dim + kTileInputs - 1) / kTileInputs * kTileInputs};
    const Bfloat16* const* const soon = call.shared ? nullptr : v;
    if (rows <= kFewTileRows) {
        score_few(q, rows, k, width, span, s, soon, turned);
    } else {
        turn_keys(k, width, span, turned, soon, width);
        by_tiles(rows, [&](long r) { score_tiles(q + r * width, turned, width, span, s.scores + r * kAttentionBlock); });
    }
    weigh_pairs(call, rows, s);
    if (harmless(s, rows, v, span, widths.v)) {
        pack_halves(s, v, widths.v, span, ahead, packed);
        add_tiles(s, 0, rows, packed, widths);
    } else {
        add_apart(s, rows, v, widths, packed);
    }
    release_tiles();  // or the operating system would save them at every switch of threads
}

}  // namespace
}  // namespace quintet::cpu
