// The ranks of a model as processes, for Python.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cpu/bindings/bind.h"
#include "cpu/bindings/bind_checks.h"
#include "cpu/comm/collectives.h"
#include "cpu/graph.h"
#include "cpu/comm/mesh.h"
#include "cpu/team.h"

namespace nb = nanobind;

namespace quintet::cpu {

namespace {

template <typename T = void>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

FloatType type_of(int kind) {
    expect(kind >= 0 && kind < kFloatTypes,
           "kind must be 0 (float32), 1 (bfloat16) or 2 (float16), not " + std::to_string(kind));
    return static_cast<FloatType>(kind);
}

std::string_view view_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }
nb::bytes bytes_of(const std::string& text) { return nb::bytes(text.data(), text.size()); }

void reduce(Ranks& team, int kind, uintptr_t out, uintptr_t x, long count) {
    const FloatType type = type_of(kind);
    expect(count >= 0, "count must be 0 or more");
    const nb::gil_scoped_release released;
    submit(all_reduce, {&team, at(out), at(x), count, type});
}

void gather(Ranks& team, uintptr_t out, uintptr_t x, long outer, long bytes) {
    expect(outer >= 0 && bytes >= 1, "outer must be 0 or more, bytes 1 or more");
    const nb::gil_scoped_release released;
    submit(all_gather, {&team, at(out), at(x), outer, bytes});
}

void spread(Ranks& team, uintptr_t x, long bytes, int root) {
    expect(bytes >= 0, "bytes must be 0 or more");
    expect(root >= 0 && root < team.size(), "root must be one of the ranks");
    const nb::gil_scoped_release released;
    submit(broadcast, {&team, at(x), bytes, root});
}

template <typename Who>
nb::list exchange(Who& team, const nb::bytes& note) {
    std::vector<std::string> notes;
    {
        const std::string_view mine = view_of(note);
        const nb::gil_scoped_release released;
        notes = team.exchange(mine);
    }
    nb::list found;
    for (const std::string& each : notes) found.append(bytes_of(each));
    return found;
}

Shelf shelf_of(int number) {
    expect(number == kNotes || number == kGoods, "shelf must be 0 (notes) or 1 (goods)");
    return static_cast<Shelf>(number);
}

nb::tuple take(Team& team, int whose, int number, uint32_t step) {
    expect(whose >= 0 && whose < team.size() * team.stages(), "whose must be one of the ranks");
    const Shelf shelf = shelf_of(number);
    uint64_t bytes = 0;
    const void* there = nullptr;
    {
        const nb::gil_scoped_release released;
        there = team.take(whose, shelf, step, bytes);
    }
    return nb::make_tuple(reinterpret_cast<uintptr_t>(there), bytes);
}

void put(Team& team, int number, uint32_t step, uint64_t bytes) { team.put(shelf_of(number), step, bytes); }

uintptr_t place(const Team& team, int number, uint32_t step) {
    return reinterpret_cast<uintptr_t>(team.shelf(shelf_of(number), step));
}

void tell(Team& team, const nb::bytes& letter) {
    const std::string_view text = view_of(letter);
    const nb::gil_scoped_release released;
    team.tell(text);
}

nb::bytes hear(Team& team) {
    std::string letter;
    {
        const nb::gil_scoped_release released;
        letter = team.hear();
    }
    return bytes_of(letter);
}

}  // namespace

void bind_collectives(nb::module_& m) {
    nb::exception<RankLost>(m, "RankLost", PyExc_RuntimeError);
    nb::exception<StepLeft>(m, "StepLeft", PyExc_RuntimeError);
    m.attr("MOST_RANKS") = kMostRanks;
    m.attr("MOST_STAGES") = kMostStages;
    m.attr("SHELF_BYTES") = kShelfBytes;
    m.attr("NOTHING") = kNothing;
    nb::class_<Ranks>(m, "Ranks", "What the ranks of one model compute together.")
        .def_prop_ro("rank", &Ranks::rank)
        .def_prop_ro("size", &Ranks::size)
        .def("all_reduce", &reduce, nb::arg("kind"), nb::arg("out"), nb::arg("x"), nb::arg("count"),
             "The sum of [count] over the ranks, in their order, in float32. StepLeft: a rank has left the step.")
        .def("all_gather", &gather, nb::arg("out"), nb::arg("x"), nb::arg("outer"), nb::arg("bytes"),
             "[outer, bytes] of each rank -> [outer, ranks, bytes].")
        .def("broadcast", &spread, nb::arg("x"), nb::arg("bytes"), nb::arg("root"), "The root's bytes on every rank.");
    nb::class_<Team, Ranks>(m, "Team", "Ranks that are processes of this host and share a file's memory.")
        .def(nb::init<int, int, int, double, int>(), nb::arg("descriptor"), nb::arg("rank"), nb::arg("size"),
             nb::arg("seconds"), nb::arg("group"),
             "Maps the file, empty at first; `seconds`: how long a rank waits for another before all give up (RankLost); "
             "`group`: ranks of a stage, which compute together.")
        .def_prop_ro("stage", &Team::stage)
        .def_prop_ro("stages", &Team::stages)
        .def("begin", &Team::begin, nb::arg("step"), "The step that collectives are of from now on.")
        .def("place", &place, nb::arg("shelf"), nb::arg("step"), "Where something may be written for others, by step.")
        .def("put", &put, nb::arg("shelf"), nb::arg("step"), nb::arg("bytes"), "It lies there now, with so many bytes.")
        .def("take", &take, nb::arg("whose"), nb::arg("shelf"), nb::arg("step"),
             "(address, bytes) of what that rank of all has put down, once it has; NOTHING bytes: it could not be made.")
        .def("exchange", &exchange<Team>, nb::arg("note"), "What every rank brings, in rank order; ends a step for all.")
        .def("tell", &tell, nb::arg("letter"), "To all other ranks; rank 0's to call.")
        .def("hear", &hear, "The next letter of rank 0, waited for as long as it takes.")
        .def("stop", [](Team& team, const std::string& why) { team.stop(why); }, nb::arg("why"),
             "Nobody waits any more: RankLost with this reason, on every rank.")
        .def("stopped", &Team::stopped, "The reason why nobody waits any more; empty if all is well.");
    nb::class_<Mesh, Ranks>(m, "Mesh", "Ranks that have a connected socket to each other, on whichever machines.")
        .def(nb::init<const std::vector<int>&, int, double>(), nb::arg("sockets"), nb::arg("rank"), nb::arg("seconds"),
             "Takes the sockets' descriptors over, by rank, -1 in the own place.")
        .def("exchange", &exchange<Mesh>, nb::arg("note"), "What every rank brings, in rank order; ends a step for all.")
        .def("stop", [](Mesh& mesh, const std::string& why) { mesh.stop(why); }, nb::arg("why"),
             "Nobody waits any more, on this rank: RankLost with this reason.")
        .def("stopped", &Mesh::stopped, "The reason why nobody waits any more; empty if all is well.");
}

}  // namespace quintet::cpu
