// Products of rows that are sorted by matrix: an expert's are side by side, and all experts' blocks are shared out at once.
#pragma once

#include <vector>

#include "common/share.h"
#include "cpu/kernels/linear.h"
#include "cpu/linear/linear.h"

namespace quintet::cpu {

// Rows of one matrix that are computed at once.
struct Panel {
    long matrix, first, rows;
};

struct SortedRows {
    const int32_t* counts;  // [matrices]: the first counts[0] rows are the first matrix's, and so on
    long matrices, rows;    // rows: the counts' sum
    // Where the rows come from: those of token t go to places[t k] .. places[t k + k - 1], or nowhere where that is below
    // 0. Null: they are in order.
    const int32_t* places = nullptr;
    long tokens = 0, k = 0;
};

// This thread's list, valid until the next call. Matrices without rows are not in it.
const std::vector<Panel>& panels_of(const SortedRows& sorted, long blocks);

// body(panel, block) for the blocks of all panels; a panel's one after another, as they lie.
template <typename Body>
void for_panels(const SortedRows& sorted, long inputs, long outputs, const Body& body) {
    const long blocks = (outputs + kLinearColumns - 1) / kLinearColumns;
    const std::vector<Panel>& panels = panels_of(sorted, blocks);
    const long items = static_cast<long>(panels.size()) * blocks;
    share_out(items, linear_parts(items, sorted.rows * inputs * outputs),
              [&](long item) { body(panels[static_cast<size_t>(item / blocks)], item % blocks); });
}

// Rows of so many bytes, `stride` apart, as the places have them.
struct Gathered {
    const void* x;
    long stride;
};

// One token's rows are all the same, and stay where they are. The others are copied to `spare`, side by side.
Gathered gathered(const SortedRows& sorted, const void* x, long stride, long bytes, void* spare);

}  // namespace quintet::cpu
