#include "cpu/elementwise/elementwise.h"

#include "cpu/rows.h"

namespace quintet::cpu {

namespace {

// Threads take pieces of rows: one row may be all that there is.
void run(ElementwiseKernel kernel, const ElementwiseCall& c) {
    constexpr long kPiece = 1024;  // numbers; whole vectors of every instruction set
    const long size = size_of(c.type), pieces = (c.width + kPiece - 1) / kPiece;
    const auto at = [=](const void* x, long place) { return static_cast<const char*>(x) + place * size; };
    for_rows(c.rows * pieces, kPiece * size, [&](long first, long last) {
        while (first < last) {  // what lies in one row is one call
            const long row = first / pieces, end = std::min(last, (row + 1) * pieces);
            const long start = first % pieces * kPiece, stop = std::min(c.width, (end - row * pieces) * kPiece);
            kernel(static_cast<char*>(c.out) + (row * c.width + start) * size, at(c.x, row * c.x_stride + start),
                   c.y ? at(c.y, row * c.y_stride + start) : nullptr, c.factor, stop - start);
            first = end;
        }
    });
}

}  // namespace

void elementwise(const ElementwiseCall& call) {
    run(QUINTET_KERNELS(kElementwise).of[static_cast<int>(call.op)][call.type], call);
}

void scale_heads(const HeadsCall& c) {
    const ElementwiseKernel kernel = QUINTET_KERNELS(kElementwise).of[static_cast<int>(Elementwise::scale)][c.type];
    const long size = size_of(c.type), each = c.heads / c.groups;
    for_rows(c.tokens * c.heads, c.dim * size, [&](long first, long last) {
        for (long row = first; row < last; ++row) {
            const long token = row / c.heads, head = row % c.heads;
            kernel(static_cast<char*>(c.out) + row * c.dim * size,
                   static_cast<const char*>(c.x) + (token * c.token_stride + head * c.head_stride) * size, nullptr,
                   c.factors[head / each], c.dim);
        }
    });
}

void gated(const ElementwiseCall& call) {
    run(QUINTET_KERNELS(kElementwise).gated[static_cast<int>(call.op)][call.type], call);
}

}  // namespace quintet::cpu
