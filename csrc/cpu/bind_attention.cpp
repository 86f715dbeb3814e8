// Attention kernels for Python.
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu/attention.h"
#include "cpu/bind.h"
#include "cpu/graph.h"

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
    throw std::invalid_argument(std::string("a cache is same, int8 or fp8, not ") + kv);
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
    long heads, kv_heads, head_dim, page_size, window;
    float scale, softcap;
    AttentionType type;
    KVKind kind;

    PagedAttention(long heads_, long kv_heads_, long head_dim_, long page_size_, long window_, float scale_,
                   float softcap_, int bits, bool brain, const char* kv)
        : heads(heads_), kv_heads(kv_heads_), head_dim(head_dim_), page_size(page_size_), window(window_),
          scale(scale_), softcap(softcap_), type(type_of(bits, brain)), kind(kind_of(kv)) {
        positive("kv_heads", kv_heads);
        positive("heads", heads);
        positive("head_dim", head_dim);
        positive("page_size", page_size);
        if (heads % kv_heads) throw std::invalid_argument("heads must be a multiple of kv_heads");
        if (window < 0) throw std::invalid_argument("window must be 0 (none) or more");
        if (!(softcap >= 0.0F)) throw std::invalid_argument("softcap must be 0 (none) or more");
    }

    void call(uintptr_t out, uintptr_t q, long q_stride, uintptr_t kv, long pages, uintptr_t positions,
              uintptr_t starts, uintptr_t lengths, uintptr_t page_table, long tokens, long requests, long width,
              uintptr_t sinks, uintptr_t slopes) const {
        if (tokens < 0 || requests < 0 || width < 0 || pages < 0) {
            throw std::invalid_argument("sizes must be 0 or more");
        }
        if (tokens > 1 && q_stride < heads * head_dim) throw std::invalid_argument("q's tokens overlap");
        const nb::gil_scoped_release released;
        submit(attend, {{at<void>(out), at<const void>(q), at<const void>(kv), at<const int32_t>(positions),
                         at<const float>(sinks), at<const float>(slopes), q_stride, heads, kv_heads, head_dim, page_size, window, scale,
                         softcap},
                        {at<const int32_t>(starts), at<const int32_t>(lengths), at<const int32_t>(page_table), tokens,
                         requests, width, pages},
                        type, kind});
    }
};

void store(uintptr_t kv, uintptr_t k, uintptr_t v, long k_stride, long v_stride, uintptr_t slots, long tokens,
           long pages, long heads, long page_size, long head_dim, int bits, bool brain, const char* kind) {
    if (tokens < 0 || pages < 0) throw std::invalid_argument("sizes must be 0 or more");
    positive("heads", heads);
    positive("page_size", page_size);
    positive("head_dim", head_dim);
    const KVWrite call{at<char>(kv), at<const char>(k), at<const char>(v), k_stride, v_stride, at<const int32_t>(slots),
                       tokens, pages, heads, page_size, head_dim, type_of(bits, brain), kind_of(kind)};
    const nb::gil_scoped_release released;
    submit(write_kv, call);
}

}  // namespace

void bind_attention(nb::module_& m) {
    nb::class_<PagedAttention>(m, "PagedAttention",
                               "One layer's attention on floats of 32 or 16 bits; `brain`: bfloat16; `kv`: the cache's "
                               "numbers, same, int8 or fp8.")
        .def(nb::init<long, long, long, long, long, float, float, int, bool, const char*>(), nb::arg("heads"),
             nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("page_size"), nb::arg("window"), nb::arg("scale"),
             nb::arg("softcap"), nb::arg("bits"), nb::arg("brain"), nb::arg("kv"))
        .def("__call__", &PagedAttention::call, nb::arg("out"), nb::arg("q"), nb::arg("q_stride"), nb::arg("kv"),
             nb::arg("pages"), nb::arg("positions"), nb::arg("starts"), nb::arg("lengths"), nb::arg("page_table"),
             nb::arg("tokens"), nb::arg("requests"), nb::arg("width"), nb::arg("sinks"), nb::arg("slopes"),
             "Addresses of out, q, kv, of the batch's int32 arrays and of float32 sinks and slopes or 0; sizes in "
             "elements. ValueError for a batch that points outside its arrays.");
    m.def("store_kv", &store, nb::arg("kv"), nb::arg("k"), nb::arg("v"), nb::arg("k_stride"), nb::arg("v_stride"),
          nb::arg("slots"), nb::arg("tokens"), nb::arg("pages"), nb::arg("heads"), nb::arg("page_size"),
          nb::arg("head_dim"), nb::arg("bits"), nb::arg("brain"), nb::arg("kind"),
          "Writes K and V [T, heads, head_dim] to their slots of a cache whose numbers are `kind`; strides in bytes.");
}

}  // namespace quintet::cpu
