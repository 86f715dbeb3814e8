#include "cpu/states/states.h"

#include <cstdint>
#include <stdexcept>

#include "cpu/rows.h"

namespace quintet::cpu {

namespace {

void check_drafts(const StateRows& rows, long r, const int* units) {
    const long tokens = rows.query_start_loc[r + 1] - rows.query_start_loc[r];
    if (units[2] < 0 || units[2] > rows.drafts || units[3] < 0 || units[3] > rows.drafts)
        throw std::invalid_argument("a request has more drafts than its state has room for");
    if (units[3] && units[3] >= tokens) throw std::invalid_argument("a step has a token before its drafts");
    if (units[2] && !(units[0] && tokens)) throw std::invalid_argument("drafts were accepted, and no state is before them");
}

// A kernel reads and writes where the block table says: looked at once, before it runs.
void check(const StateRows& rows) {
    for (long r = 0; r < rows.requests; ++r) {
        const int* const units = rows.block_table + r * rows.columns;
        for (long side = 0; side < 2; ++side) {
            if (units[side] < 0 || units[side] >= rows.units) throw std::invalid_argument("a state lies in no unit that is there");
        }
        if (units[0] == units[1] && units[0]) throw std::invalid_argument("a step writes a state where it reads it");
        if (rows.query_start_loc[r] > rows.query_start_loc[r + 1])
            throw std::invalid_argument("a request ends before it begins");
        if (rows.drafts) check_drafts(rows, r, units);
    }
}

constexpr long kPastCaches = 1L << 20;  // bytes of one layer's states: those of all layers are in no cache by the next step

// One token each, and many bytes: a state that comes back to its cache line only to be written costs the bandwidth twice.
// A head that fills no whole cache lines is written as usual.
bool past_caches(const SpaceCall& c) {
    const long size = c.dim * c.width * 4, line = 64;
    const bool lines = c.width * 4 % line == 0 && c.unit * 4 % line == 0 && reinterpret_cast<std::uintptr_t>(c.state) % line == 0;
    return lines && c.tokens <= c.rows.requests && c.rows.requests * c.heads * size >= kPastCaches;
}

long bytes(const StateRows& rows, long tokens, long each) {
    return each * 4 * (1 + tokens / (rows.requests > 0 ? rows.requests : 1));
}

}  // namespace

void short_conv(const ConvCall& c) {
    check(c.rows);
    const long blocks = (c.channels + kConvBlock - 1) / kConvBlock, tokens = c.rows.query_start_loc[c.rows.requests];
    const auto kernel = QUINTET_KERNELS(kStates).conv[c.type];
    for_rows(c.rows.requests * blocks, bytes(c.rows, tokens, kConvBlock * c.taps),
             [&](long first, long last) { kernel(c, first, last); });
}

void state_space(const SpaceCall& call) {
    check(call.rows);
    SpaceCall c = call;
    c.past_caches = past_caches(c);
    const auto& kernels = QUINTET_KERNELS(kStates);
    const auto moves = kernels.moves[c.type], space = kernels.space[c.type];
    for_rows(c.tokens, (c.heads * 8 + c.groups * c.width) * 4, [&](long first, long last) { moves(c, first, last); });
    for_rows(c.rows.requests * c.heads, bytes(c.rows, c.tokens, c.dim * c.width),
             [&](long first, long last) { space(c, first, last); });
}

void selective_scan(const SelectiveCall& c) {
    check(c.rows);
    const auto& kernels = QUINTET_KERNELS(kStates);
    const auto sides = kernels.sides[c.type], selective = kernels.selective[c.type];
    const long blocks = (c.channels + kConvBlock - 1) / kConvBlock;
    for_rows(c.tokens, c.width * 4, [&](long first, long last) { sides(c, first, last); });
    for_rows(c.rows.requests * blocks, bytes(c.rows, c.tokens, kConvBlock * c.width * 4),
             [&](long first, long last) { selective(c, first, last); });
}

void delta_rule(const DeltaCall& c) {
    check(c.rows);
    const auto& kernels = QUINTET_KERNELS(kStates);
    const auto rates = kernels.rates[c.type], unit = kernels.unit[c.type], kernel = kernels.delta[c.type];
    const long decays = c.heads * (c.by_channel ? c.width : 1);
    for_rows(c.tokens, (c.heads + decays) * 16, [&](long first, long last) { rates(c, first, last); });
    for_rows(c.tokens * c.groups, c.width * 16, [&](long first, long last) { unit(c, first, last); });
    for_rows(c.rows.requests * c.heads, bytes(c.rows, c.tokens, 2 * c.values * c.width),
             [&](long first, long last) { kernel(c, first, last); });
}

void gated_norm(const GatedNormCall& c) {
    const auto kernel = QUINTET_KERNELS(kStates).norm[c.type];
    for_rows(c.tokens * c.pieces, c.width * 16, [&](long first, long last) { kernel(c, first, last); });
}

void sigmoid_gate(const SigmoidCall& c) {
    const auto kernel = QUINTET_KERNELS(kStates).sigmoid[c.type];
    for_rows(c.rows, c.width * 8, [&](long first, long last) { kernel(c, first, last); });
}

}  // namespace quintet::cpu
