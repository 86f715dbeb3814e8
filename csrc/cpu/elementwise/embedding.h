// The look-up of rows, and rows side by side. Tensors are addresses; sizes and strides are in bytes.
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

struct BesideCall {
    void* out;      // [rows, x_width + y_width]
    const void* x;  // [rows, x_width]
    const void* y;  // [rows, y_width]
    long rows, x_width, y_width, x_stride, y_stride;
};

void beside(const BesideCall& call);

struct PlaceRowsCall {
    void* out;              // [tokens, width]
    const void* x;          // [tokens, width]
    const void* given;      // [rows, width]
    const int32_t* places;  // [tokens], -1: the token's row is x's
    long tokens, rows, width, x_stride, given_stride;
    bool own;               // a token with a place takes the row of its own number, and not that of its place
};

// Throws std::invalid_argument for a place without a row, before anything is written.
void place_rows(const PlaceRowsCall& call);

}  // namespace quintet::cpu
