// The look-up of rows. Tensors are addresses; sizes and strides are in bytes.
#pragma once

#include <cstdint>

namespace quintet::cpu {

struct EmbeddingCall {
    void* out;             // [count, width]
    const int32_t* ids;    // [count]
    const void* table;     // [rows, width]
    long count, rows, width, stride;
    long first;            // the id of the table's first row
    bool partial;          // ids that the table does not hold give zeros, and are refused otherwise
};

// Throws std::invalid_argument for an id that is refused, before anything is written.
void embedding(const EmbeddingCall& call);

}  // namespace quintet::cpu
