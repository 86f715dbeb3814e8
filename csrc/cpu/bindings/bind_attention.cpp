// Attention kernels for Python.
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu/attention/attention.h"
#include "cpu/bindings/bind.h"
#include "cpu/graph.h"
#include "cpu/attention/whole_attention.h"

namespace nb = nanobind;

namespace quintet::cpu {

namespace {

template <typename T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

void positive(const char* name, long value) {
    if (value < 1) throw std::invalid_argument(std::string(name) + " must be 1 or more, not " + std::to_string(value));
}

AttentionType type_of(int bits, bool brain) {
    if (bits == 32) return kFloat32;
    if (bits == 16) return brain ? kBfloat16 : kFloat16;
    throw std::invalid_argument("attention is computed on numbers of 16 or 32 bits, not " + std::to_string(bits));
}

KVKind kind_of(const char* kv) {
    if (std::strcmp(kv, "same") == 0) return kKVSame;
    if (std::strcmp(kv, "int8") == 0) return kKVInt8;
    if (std::strcmp(kv, "fp8") == 0) return kKVFloat8;
    if (std::strcmp(kv, "fp8_e5m2") == 0) return kKVFloat8Wide;
    if (std::strcmp(kv, "int4") == 0) return kKVInt4;
    throw std::invalid_argument(std::string("a cache is same, int8, fp8, fp8_e5m2 or int4, not ") + kv);
}

void check_int4(long head_dim) {
    if (head_dim % 2) throw std::invalid_argument("a 4-bit cache keeps pairs of values: head_dim must be even");
    if (head_dim > kMostInt4) throw std::invalid_argument("a 4-bit cache has heads of 1024 numbers at most");
}

struct Attend {
    AttentionCall call;
    AttentionBatch batch;
    AttentionType type;
    KVKind kind;
};

void attend(const Attend& a) { paged_attention(a.call, a.batch, a.type, a.kind); }

// One attention layer; made once, called at every step.
struct PagedAttention {
    long heads, kv_heads, head_dim, value_dim, page_size, window, chunk;
    bool causal;
    float scale, softcap;
    AttentionType type;
    KVKind kind;

    PagedAttention(long heads_, long kv_heads_, long head_dim_, long shared, long page_size_, long window_, long chunk_,
                   bool causal_, float scale_, float softcap_, int bits, bool brain, const char* kv)
        : heads(heads_), kv_heads(kv_heads_), head_dim(head_dim_), value_dim(shared ? shared : head_dim_),
          page_size(page_size_), window(window_), chunk(chunk_), causal(causal_), scale(scale_), softcap(softcap_),
          type(type_of(bits, brain)), kind(kind_of(kv)), shared_(shared != 0) {
        if (shared < 0 || shared > head_dim) throw std::invalid_argument("V is the first 1 to head_dim numbers of K");
        positive("kv_heads", kv_heads);
        positive("heads", heads);
        positive("head_dim", head_dim);
        positive("page_size", page_size);
        if (heads % kv_heads) throw std::invalid_argument("heads must be a multiple of kv_heads");
        if (window < 0) throw std::invalid_argument("window must be 0 (none) or more");
        if (chunk < 0) throw std::invalid_argument("chunk must be 0 (none) or more");
        if (chunk && (window || !causal)) throw std::invalid_argument("chunks are causal, and no windows beside them");
        if (!(softcap >= 0.0F)) throw std::invalid_argument("softcap must be 0 (none) or more");
        if (kind == kKVInt4) check_int4(head_dim);
    }

    void call(uintptr_t out, uintptr_t q, long q_stride, uintptr_t kv, long pages, uintptr_t positions,
              uintptr_t query_start_loc, uintptr_t seq_lens, uintptr_t block_table, long tokens, long requests, long width,
              uintptr_t sinks, uintptr_t slopes, long tables) const {
        if (tables != 1 && tables != kv_heads) throw std::invalid_argument("tables are one, or one for each KV head");
        if (tokens < 0 || requests < 0 || width < 0 || pages < 0) {
            throw std::invalid_argument("sizes must be 0 or more");
        }
        if (tokens > 1 && q_stride < heads * head_dim) throw std::invalid_argument("q's tokens overlap");
        const nb::gil_scoped_release released;
        submit(attend, {{at<void>(out), at<const void>(q), at<const void>(kv), at<const int32_t>(positions),
                         at<const float>(sinks), at<const float>(slopes), q_stride, heads, kv_heads, head_dim, page_size,
                         value_dim, window, chunk, shared_, causal, scale, softcap},
                        {at<const int32_t>(query_start_loc), at<const int32_t>(seq_lens),
                         at<const int32_t>(block_table), tokens,
                         requests, width, pages, tables},
                        type, kind});
    }

private:
    bool shared_;  // V is the beginning of K
};

void store(uintptr_t kv, uintptr_t k, uintptr_t v, long k_stride, long v_stride, uintptr_t slot_mapping, long tokens,
           long pages, long heads, long page_size, long head_dim, int bits, bool brain, const char* kind) {
    if (tokens < 0 || pages < 0) throw std::invalid_argument("sizes must be 0 or more");
    positive("heads", heads);
    positive("page_size", page_size);
    positive("head_dim", head_dim);
    if (kind_of(kind) == kKVInt4) check_int4(head_dim);
    const KVWrite call{at<char>(kv), at<const char>(k), at<const char>(v), k_stride, v_stride,
                       at<const int32_t>(slot_mapping),
                       tokens, pages, heads, page_size, head_dim, type_of(bits, brain), kind_of(kind)};
    const nb::gil_scoped_release released;
    submit(write_kv, call);
}

struct AttendWhole {
    WholeCall call;
    WholeBatch batch;
    AttentionType type;
};

void attend_whole(const AttendWhole& a) { whole_attention(a.call, a.batch, a.type); }

// One layer whose requests are whole in each step; made once, called at every step.
struct WholeAttention {
    long heads, kv_heads, head_dim, window, chunk;
    bool causal;
    float scale, softcap;
    AttentionType type;

    WholeAttention(long heads_, long kv_heads_, long head_dim_, long window_, long chunk_, bool causal_, float scale_,
                   float softcap_, int bits, bool brain)
        : heads(heads_), kv_heads(kv_heads_), head_dim(head_dim_), window(window_), chunk(chunk_), causal(causal_), scale(scale_),
          softcap(softcap_), type(type_of(bits, brain)) {
        positive("kv_heads", kv_heads);
        positive("heads", heads);
        positive("head_dim", head_dim);
        if (heads % kv_heads) throw std::invalid_argument("heads must be a multiple of kv_heads");
        if (window < 0) throw std::invalid_argument("window must be 0 (none) or more");
        if (chunk < 0) throw std::invalid_argument("chunk must be 0 (none) or more");
        if (chunk && (window || !causal)) throw std::invalid_argument("chunks are causal, and no windows beside them");
        if (!(softcap >= 0.0F)) throw std::invalid_argument("softcap must be 0 (none) or more");
    }

    void call(uintptr_t out, uintptr_t q, uintptr_t k, uintptr_t v, long q_stride, long k_stride, long v_stride,
              uintptr_t query_start_loc, long tokens, long requests, uintptr_t sinks, uintptr_t slopes, uintptr_t biases,
              long reach, uintptr_t of_queries, uintptr_t of_keys, uintptr_t columns, long width) const {
        if (columns && width < 1) throw std::invalid_argument("products of distances have a width");
        if (reach < 0) throw std::invalid_argument("reach must be 0 or more");
        if (tokens < 0 || requests < 0) throw std::invalid_argument("sizes must be 0 or more");
        const long least = tokens > 1 ? kv_heads * head_dim : 0;
        if (k_stride < least || v_stride < least || (tokens > 1 && q_stride < heads * head_dim)) {
            throw std::invalid_argument("tokens overlap");
        }
        const nb::gil_scoped_release released;
        submit(attend_whole, {{at<void>(out), at<const void>(q), at<const void>(k), at<const void>(v),
                               at<const float>(sinks), at<const float>(slopes), at<const float>(biases), reach,
                               q_stride, k_stride, v_stride, heads, kv_heads, head_dim, window, chunk, causal, scale, softcap,
                               {at<const void>(of_queries), at<const void>(of_keys), at<const int32_t>(columns), reach, width}},
                              {at<const int32_t>(query_start_loc), tokens, requests},
                              type});
    }
};

}  // namespace

void bind_attention(nb::module_& m) {
    nb::class_<PagedAttention>(m, "PagedAttention",
                               "One layer's attention on floats of 32 or 16 bits; `brain`: bfloat16; `kv`: the cache's "
                               "numbers, same, int8, fp8 or int4; `shared`: so many of K are V, 0 for a V of its own.")
        .def(nb::init<long, long, long, long, long, long, long, bool, float, float, int, bool, const char*>(),
             nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("shared"), nb::arg("page_size"),
             nb::arg("window"), nb::arg("chunk"), nb::arg("causal"), nb::arg("scale"), nb::arg("softcap"), nb::arg("bits"),
             nb::arg("brain"), nb::arg("kv"))
        .def("__call__", &PagedAttention::call, nb::arg("out"), nb::arg("q"), nb::arg("q_stride"), nb::arg("kv"),
             nb::arg("pages"), nb::arg("positions"), nb::arg("query_start_loc"), nb::arg("seq_lens"),
             nb::arg("block_table"),
             nb::arg("tokens"), nb::arg("requests"), nb::arg("width"), nb::arg("sinks"), nb::arg("slopes"),
             nb::arg("tables") = 1,
             "Addresses of out, q, kv, of the batch's int32 arrays and of float32 sinks and slopes or 0; sizes in "
             "elements; `tables` of a request, one or one for each KV head. ValueError for a batch that points outside its arrays.");
    nb::class_<WholeAttention>(m, "WholeAttention",
                               "One layer's attention within a step, whose requests are whole in it, on floats of 32 or 16 "
                               "bits; `brain`: bfloat16; `window` counts to both sides.")
        .def(nb::init<long, long, long, long, long, bool, float, float, int, bool>(), nb::arg("heads"), nb::arg("kv_heads"),
             nb::arg("head_dim"), nb::arg("window"), nb::arg("chunk"), nb::arg("causal"), nb::arg("scale"), nb::arg("softcap"),
             nb::arg("bits"), nb::arg("brain"))
        .def("__call__", &WholeAttention::call, nb::arg("out"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
             nb::arg("q_stride"), nb::arg("k_stride"), nb::arg("v_stride"), nb::arg("query_start_loc"), nb::arg("tokens"),
             nb::arg("requests"), nb::arg("sinks"), nb::arg("slopes"), nb::arg("biases"), nb::arg("reach"), nb::arg("of_queries") = 0,
             nb::arg("of_keys") = 0, nb::arg("columns") = 0, nb::arg("width") = 0,
             "Addresses of out, q, k, v, of int32 query_start_loc [requests + 1], of float32 sinks, slopes and biases [heads, 2 "
             "reach + 1], and of products of distances [tokens, heads, width] with int32 columns [2 reach + 1], or 0; strides in elements, from token to token. ValueError for a batch that points outside its arrays.");
    m.def("store_kv", &store, nb::arg("kv"), nb::arg("k"), nb::arg("v"), nb::arg("k_stride"), nb::arg("v_stride"),
          nb::arg("slot_mapping"), nb::arg("tokens"), nb::arg("pages"), nb::arg("heads"), nb::arg("page_size"),
          nb::arg("head_dim"), nb::arg("bits"), nb::arg("brain"), nb::arg("kind"),
          "Writes K and V (an address, or 0) [T, heads, head_dim] to their slots of a cache whose numbers are `kind`; strides "
          "in bytes.");
}

}  // namespace quintet::cpu
