// The index of past texts for Python. Not a kernel: every platform's engine uses it.
#include <nanobind/stl/vector.h>

#include "common/suffix_index.h"
#include "cpu/bindings/bind.h"
#include "cpu/bindings/bind_checks.h"

namespace nb = nanobind;

namespace quintet::cpu {

void bind_suffix_index(nb::module_& m) {
    nb::class_<SuffixIndex>(m, "SuffixIndex",
                            "As quintet.engine.spec_decode.suffix_index.PythonSuffixIndex; token ids come as an address.")
        .def(nb::init<long>(), nb::arg("capacity"))
        .def_prop_ro("position", &SuffixIndex::position)
        .def_prop_ro("num_bytes", &SuffixIndex::bytes)
        .def("forget_before", &SuffixIndex::forget_before, nb::arg("position"))
        .def(
            "append",
            [](SuffixIndex& index, uintptr_t tokens, long count, uint32_t owner, bool ends) {
                index.append(reinterpret_cast<const int32_t*>(tokens), count, owner, ends);
            },
            nb::arg("tokens"), nb::arg("count"), nb::arg("owner"), nb::arg("ends"))
        .def(
            "lookup",
            [](const SuffixIndex& index, uintptr_t tokens, long count, uint32_t owner, long most, double factor,
               double share, long depth) {
                expect(count >= 0 && depth >= 2 && factor >= 0, "count and factor must be 0 or more, depth 2 or more");
                const SuffixQuery query{reinterpret_cast<const int32_t*>(tokens), count, owner, most, factor, share, depth};
                const SuffixDraft draft = index.lookup(query);
                return nb::make_tuple(draft.tokens, draft.score, draft.match);
            },
            nb::arg("tokens"), nb::arg("count"), nb::arg("owner"), nb::arg("most"), nb::arg("factor"), nb::arg("share"),
            nb::arg("depth"));
}

}  // namespace quintet::cpu
