#include "cpu/elementwise/embedding.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu/rows.h"

namespace quintet::cpu {

namespace {

void refuse_ids_outside(const EmbeddingCall& c) {
    for (long i = 0; i < c.count; ++i) {
        if (c.ids[i] >= c.first && c.ids[i] - c.first < c.rows) continue;
        throw std::invalid_argument("id " + std::to_string(c.ids[i]) + " is outside of the table, which has " +
                                    std::to_string(c.rows) + " rows");
    }
}

}  // namespace

void embedding(const EmbeddingCall& c) {
    if (!c.partial) refuse_ids_outside(c);
    const size_t width = static_cast<size_t>(c.width);
    for_rows(c.count, c.width, [&](long first, long last) {
        for (long i = first; i < last; ++i) {
            char* const out = static_cast<char*>(c.out) + i * c.width;
            const long row = c.ids[i] - c.first;
            if (row >= 0 && row < c.rows) {
                std::memcpy(out, static_cast<const char*>(c.table) + row * c.stride, width);
            } else {
                std::memset(out, 0, width);
            }
        }
    });
}

void place_rows(const PlaceRowsCall& c) {
    for (long i = 0; i < c.tokens; ++i) {
        if (c.places[i] < 0 || (c.own ? i : c.places[i]) < c.rows) continue;
        throw std::invalid_argument("place " + std::to_string(c.places[i]) + " is outside of the " +
                                    std::to_string(c.rows) + " rows");
    }
    for_rows(c.tokens, c.width, [&](long first, long last) {
        for (long i = first; i < last; ++i) {
            const long row = c.own ? i : c.places[i];
            const char* const from = c.places[i] < 0 ? static_cast<const char*>(c.x) + i * c.x_stride
                                                     : static_cast<const char*>(c.given) + row * c.given_stride;
            std::memcpy(static_cast<char*>(c.out) + i * c.width, from, static_cast<size_t>(c.width));
        }
    });
}

void beside(const BesideCall& c) {
    const long width = c.x_width + c.y_width;
    for_rows(c.rows, width, [&](long first, long last) {
        for (long i = first; i < last; ++i) {
            char* const out = static_cast<char*>(c.out) + i * width;
            std::memcpy(out, static_cast<const char*>(c.x) + i * c.x_stride, static_cast<size_t>(c.x_width));
            std::memcpy(out + c.x_width, static_cast<const char*>(c.y) + i * c.y_stride, static_cast<size_t>(c.y_width));
        }
    });
}

}  // namespace quintet::cpu
