// The Python module quintet._cpu.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "cpu/ceilings.h"
#include "cpu/features.h"
#include "cpu/topology.h"

namespace nb = nanobind;
namespace cpu = quintet::cpu;

NB_MODULE(_cpu, m) {
    m.doc() = "What the processor can execute, and the most that it can read and compute.";

    m.def(
        "features",
        [] {
            nb::dict out;
            for (const auto& [name, value] : cpu::features()) out[name.c_str()] = value;
            return out;
        },
        nb::sig("def features() -> dict[str, bool]"),
        "Instruction-set features by their /proc/cpuinfo names; true when the operating system allows them too.");
    m.def("isa", [] { return cpu::isa_name(cpu::isa()); },
          "The best of amx, avx512_bf16, avx512, avx2, neon, baseline that may be used here.");
    m.def("arch", &cpu::arch, "x86_64, aarch64 or other.");
    m.def("physical_cores", &cpu::physical_cores, "Cores, not their threads, that this process may run on.");
    m.def("logical_cores", [] { return cpu::allowed_cpus().size(); }, "Hardware threads that this process may run on.");
    m.def("last_level_cache_bytes", &cpu::last_level_cache_bytes,
          "Bytes of last-level cache, summed over those that these cores reach; 0 when it is not known.");
    m.def("read_bandwidth", &cpu::read_bandwidth, nb::arg("bytes"), nb::arg("threads"), nb::arg("seconds"),
          nb::call_guard<nb::gil_scoped_release>(),
          "Best rate in GB/s at which `threads` threads read a buffer of `bytes` (1 MiB to 64 GiB), over `seconds`.");
    m.def("fma_peak", &cpu::fma_peak, nb::arg("threads"), nb::arg("seconds"), nb::call_guard<nb::gil_scoped_release>(),
          "Best rate in GFLOP/s of float32 multiply-adds in registers on `threads` threads, over `seconds`.");
}
