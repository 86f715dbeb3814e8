// Attention of a few query tokens over the pages of their request, one object for each instruction set.
//
// These files are compiled with flags that the processor at hand may not obey: see ceiling.h for what they may include.
// A row is one query head of one token. Its result is made of its own numbers in one order, whatever rows are computed
// beside it: the context is cut into stretches of kAttentionStretch positions counted from 0, each is gone through in
// blocks of kAttentionBlock with a running maximum (Dao et al. 2022), and what the stretches gave is merged in order.
// Stretches may therefore be left to different threads.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace quintet::cpu {

constexpr long kAttentionBlock = 64;  // positions; K and V of 128 in float32 are 64 KiB, within a core's second cache

constexpr long kAttentionStretch = 1024;

enum AttentionType { kFloat32, kBfloat16, kFloat16, kAttentionTypes };  // of q and of the result

// What a row of the cache is: head_dim numbers of q's type; as many int8, then the float32 that they are multiples of;
// as many of e4m3fn, or of e5m2; or groups of 4-bit codes, turned by Hadamard matrices (attention_groups.h).
enum KVKind { kKVSame, kKVInt8, kKVFloat8, kKVFloat8Wide, kKVInt4, kKVKinds };

constexpr long kScaleBytes = 4;
constexpr long kMostInt4 = 1024;  // of head_dim in a 4-bit cache
constexpr long kGroup = 32;  // values of a 4-bit row that share a scale and a minimum; the last group may have fewer

// Of a 4-bit row: a code of each value, and two float16 of each group. head_dim is even.
constexpr long int4_row_bytes(long head_dim) { return head_dim / 2 + (head_dim + kGroup - 1) / kGroup * 4; }

struct AttentionCall {
    void* out;                 // [T, heads, value_dim]
    const void* q;             // [T, heads, head_dim], q_stride elements from token to token
    const void* kv;            // [P, 2, kv_heads, page_size] rows; [P, 1, ...] where V is the beginning of K
    const int32_t* positions;  // [T]
    const float* sinks;        // [heads], or null
    const float* slopes;       // [heads], times the distance to a key they are taken from its score; or null
    long q_stride;
    long heads, kv_heads, head_dim, page_size;
    long value_dim;            // numbers of V, and of a result: head_dim, or fewer where V is the beginning of K
    long window;               // positions that a token sees, its own included; 0: all before it
    long chunk;                // a token sees back to the last multiple of it, itself included; 0: no chunks
    bool shared;               // V is the beginning of K
    bool causal;               // a token sees what is before it; false: all of its request, or a window to both sides
    float scale;
    float softcap;             // 0: none
    bool turned = false;       // groups of K and V are kept turned: queries are turned, and results turned back
};

// The first position that a token at `own` sees. Each object of kernels has a copy of its own.
[[maybe_unused]] static inline long first_seen(const AttentionCall& call, long own) {
    if (call.chunk > 0) return own - own % call.chunk;
    return call.window > 0 && own >= call.window ? own + 1 - call.window : 0;
}

struct AttentionItem {
    const int32_t* pages;  // of the request, in order
    long token, tokens;    // consecutive tokens of one request, in the order of their positions
    long length;           // positions of the request
    long kv_head;
    long head, heads;      // query heads: the first and how many, all of that KV head
};

// What is added to a score before it is scaled: two products with learned vectors of distances, found by column. Each is
// [T, heads, width] of q's type, or null.
struct DistanceProducts {
    const void* of_queries = nullptr;
    const void* of_keys = nullptr;
    const int32_t* columns = nullptr;  // [2 reach + 1], by how far a key is behind its query; null: nothing is added
    long reach = 0, width = 0;
};

// Attention of requests that are whole in a step and keep nothing: no pages, and no stretches, since nothing is cut.
struct WholeCall {
    void* out;                           // [T, heads, head_dim]
    const void *q, *k, *v;               // [T, heads, head_dim], [T, kv_heads, head_dim] twice; heads side by side
    const float* sinks;                  // as AttentionCall's
    const float* slopes;
    const float* biases;                 // [heads, 2 reach + 1], by how far a key is behind its query, added to its score
    long reach;                          // keys that are further count as the last
    long q_stride, k_stride, v_stride;   // elements from token to token
    long heads, kv_heads, head_dim;
    long window;                         // a token sees fewer than so many to each side; 0: all
    long chunk;                          // as AttentionCall's
    bool causal;                         // and none behind its own
    float scale;
    float softcap;
    DistanceProducts distances = {};
};

struct WholeItem {
    long start, length;  // of the request: its first token, and how many it has
    long first, last;    // of these, whose results are the item's
    long kv_head;
};

// Memory is aligned to 64.
struct AttentionKernels {
    size_t (*scratch)(long rows, long head_dim);  // bytes that each function below needs for an item of so many rows
    size_t (*partial)(long rows, long head_dim);  // bytes of what one stretch gives
    // The whole of an item.
    void (*attend[kAttentionTypes][kKVKinds])(const AttentionCall& call, const AttentionItem& item, void* scratch);
    // The same in two steps: a stretch by its number, then `count` of what they gave, in order.
    void (*stretch[kAttentionTypes][kKVKinds])(const AttentionCall& call, const AttentionItem& item, long number,
                                               void* scratch, void* partial);
    void (*join[kAttentionTypes])(const AttentionCall& call, const AttentionItem& item, long count, void* partials,
                                  void* scratch);
    // Makes a row of the cache of head_dim numbers; null for kKVSame, which is a copy.
    void (*quantize[kAttentionTypes][kKVKinds])(const void* from, long head_dim, void* row);
    size_t (*whole_scratch)(long length, long head_dim);  // bytes for an item of a request of so many tokens
    void (*whole[kAttentionTypes])(const WholeCall& call, const WholeItem& item, void* scratch);
};

extern const AttentionKernels kAttentionBaseline;
#if defined(__x86_64__)
extern const AttentionKernels kAttentionAvx2;
extern const AttentionKernels kAttentionAvx512;
extern const AttentionKernels kAttentionAvx512Bf16;
AttentionKernels with_tiles(const AttentionKernels& pairs);  // these, but for what AMX multiplies
#endif

}  // namespace quintet::cpu
