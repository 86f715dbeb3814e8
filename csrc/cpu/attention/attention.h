// Attention over the pages of the KV cache, and the writing of them. Tensors are addresses; sizes are in elements.
#pragma once

#include "cpu/kernels/attention.h"

namespace quintet::cpu {

// What one step brings: T tokens of R requests. As quintet.interface.types.Batch and its Group; all int32.
struct AttentionBatch {
    const int32_t* query_start_loc;      // [R + 1]
    const int32_t* seq_lens;     // [R]
    const int32_t* block_table;       // [R, tables, width], pages
    long tokens, requests, width;
    long pages;                 // of the cache
    long tables = 1;            // of a request: one, or one for each KV head
};

// Fills call.out; the tokens past the last request's get zeros. A row of the result depends on its own request alone,
// not on the batch, on how its prompt was cut, or on the number of threads. Throws std::invalid_argument for a batch
// that points outside its arrays.
void paged_attention(const AttentionCall& call, const AttentionBatch& batch, AttentionType type, KVKind kind);

struct KVWrite {
    char* kv;              // [P, 2, heads, page_size] rows; [P, 1, ...] without v
    const char *k, *v;     // [T, heads, head_dim], v or null, from token to token so many bytes:
    long k_stride, v_stride;
    const int32_t* slot_mapping;  // [T]
    long tokens, pages, heads, page_size, head_dim;
    AttentionType type;    // of k and v
    KVKind kind;
};

// Writes each token's K and V to its slot; where two share one, the later wins. Throws as above.
void write_kv(const KVWrite& write);

}  // namespace quintet::cpu
