// The sampling ops on host memory: see quintet/ops/sampling.py for what each of them gives.
//
// A row's result is a function of its own logits and parameters: rows are shared out to threads whole, or in pieces whose
// results are the same in whatever order they are joined. Every function throws std::invalid_argument for sizes, rows and
// ids that are not there.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quintet::cpu {

enum class LogitType { float32, bfloat16, float16 };

// Rows of logits; `stride` elements from row to row, at least `vocab`.
template <typename T>
struct Rows {
    T* at;
    long stride, rows, vocab;

    T* row(long r) const { return at + r * stride; }
};

constexpr int32_t kNobody = -1;  // a token where none can be drawn
constexpr int32_t kUnsure = -2;  // where the last bit of a logarithm or an exponential decides

struct DrawColumns {  // [R] each
    const float* temperature;
    const int32_t* top_k;
    const float* top_p;
    const float* log_min_p;
    const int32_t* keys;  // [R, 2]
    const int32_t* positions;
};

struct Places {  // [M] each
    const int32_t* rows;
    const int32_t* ids;
    long count;
};

struct TopLogprobs {
    const int32_t* tokens;  // [R]
    const int32_t* wanted;  // [R]
    long num;
    bool normalize;
    int32_t* ids;    // [R, num + 1]
    float* values;   // [R, num + 1]
    int32_t* ranks;  // [R]
};

void greedy(const Rows<const void>& logits, LogitType type, int32_t* out);
// -> how many rows are kUnsure.
long sample(const Rows<const float>& logits, const DrawColumns& draw, int32_t* out);
// unsure[r] is 1 where the last bit of an exponential decides what stays. -> how many are.
long filter_logits(const Rows<const float>& logits, const DrawColumns& draw, float* out, int32_t* unsure);
void gumbel(const int32_t* keys, const int32_t* positions, const int32_t* ids, long rows, long id_rows, long count,
            float* out);
void top_logprobs(const Rows<const float>& logits, const TopLogprobs& asked);

void widen(const Rows<const void>& logits, LogitType type, float* out);
void scale_logits(const Rows<const float>& logits, const float* temperature, float* out);
void penalize(const Rows<float>& logits, const Places& places, const int32_t* counts, const float* penalties);
void bias_tokens(const Rows<float>& logits, const Places& places, const float* values);
void ban_tokens(const Rows<float>& logits, const Places& places);
void keep_tokens(const Rows<float>& logits, const int32_t* bits);

}  // namespace quintet::cpu
