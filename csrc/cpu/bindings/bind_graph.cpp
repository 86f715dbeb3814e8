// Recorded steps for Python.
#include <stdexcept>

#include "cpu/bindings/bind.h"
#include "cpu/graph.h"

namespace nb = nanobind;

namespace quintet::cpu {

void bind_graph(nb::module_& m) {
    nb::class_<Graph>(m, "Graph", "Kernel calls in the order in which they were made.")
        .def(nb::init<>())
        .def(
            "begin",
            [](Graph& graph) {
                if (recording()) throw std::logic_error("this thread records a graph already");
                recording() = &graph;
            },
            "From now on this thread's kernel calls are run and added.")
        .def("end", [](Graph&) { recording() = nullptr; }, "Nothing is added any more.")
        .def("run", &Graph::run, nb::call_guard<nb::gil_scoped_release>(), "All calls again, in order.")
        .def("__len__", &Graph::size);
}

}  // namespace quintet::cpu
