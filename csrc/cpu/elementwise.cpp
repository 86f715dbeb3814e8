#include "cpu/elementwise.h"

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

void gated(const ElementwiseCall& call) {
    run(QUINTET_KERNELS(kElementwise).gated[static_cast<int>(call.op)][call.type], call);
}

}  // namespace quintet::cpu
