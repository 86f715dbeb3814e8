// The Python module quintet._cpu.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>

#include "common/pool.h"
#include "cpu/bindings/bind.h"
#include "cpu/ceilings.h"
#include "cpu/features.h"
#include "cpu/topology.h"

namespace nb = nanobind;
namespace cpu = quintet::cpu;

NB_MODULE(_cpu, m) {
    m.doc() = "Kernels, what the processor can execute, and the most that it can read and compute.";
    nb::set_leak_warnings(false);  // caches in Python hold some of our objects until the very end

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
    m.def("chosen_isa", [] { return cpu::isa_name(cpu::chosen_isa()); }, "What kernels are picked for now.");
    m.def("choose_isa", &cpu::choose_isa, nb::arg("name"),
          "Picks kernels for a lower instruction set than the processor's, or its own again; ValueError names those here.");
    m.def(
        "set_threads",
        [](int threads, bool bind, int rank, int ranks) {
            cpu::share_cores(rank, ranks);
            quintet::set_pool_threads(threads, bind ? &cpu::settle_worker : nullptr);
            quintet::limit_pool_threads(0);
        },
        nb::arg("threads"), nb::arg("bind") = false,
        nb::arg("rank") = 0, nb::arg("ranks") = 1, nb::call_guard<nb::gil_scoped_release>(),
        "Threads that kernels share their work out to, 1 to 256, and no limit for those that the caller starts; results do "
        "not depend on it. `bind`: one on each core, "
        "if these are all the cores of the machine's nodes that this process may use; of several ranks, each has its own.");
    m.def("limit_threads", &quintet::limit_pool_threads, nb::arg("threads"),
          "The kernels that this thread calls take so many threads at most; 0 is no limit.");
    m.def("shared_jobs", &quintet::shared_jobs, nb::call_guard<nb::gil_scoped_release>(),
          "Jobs that threads have shared since set_threads() started them, modulo 2^32.");
    m.def("threads", &quintet::pool_threads, "As set_threads() left it, or this thread's limit; 1 at first.");
    m.def("arch", &cpu::arch, "x86_64, aarch64 or other.");
    m.def("physical_cores", &cpu::physical_cores, "Cores, not their threads, that this process may run on.");
    m.def("logical_cores", [] { return cpu::allowed_cpus().size(); }, "Hardware threads that this process may run on.");
    m.def("last_level_cache_bytes", &cpu::last_level_cache_bytes,
          "Bytes of last-level cache, summed over those that these cores reach; 0 when it is not known.");
    m.def("read_bandwidth", &cpu::read_bandwidth, nb::arg("bytes"), nb::arg("threads"), nb::arg("seconds"),
          nb::call_guard<nb::gil_scoped_release>(),
          "Best rate in GB/s at which `threads` threads read a buffer of `bytes` (1 MiB to 64 GiB), over `seconds`.");
    m.def(
        "fma_peak",
        [](int64_t threads, double seconds, const std::string& numbers) {
            constexpr std::string_view names[cpu::kNumbers] = {"float32", "bfloat16", "int8"};
            const auto* const found = std::find(std::begin(names), std::end(names), numbers);
            if (found == std::end(names)) throw std::invalid_argument("numbers must be float32, bfloat16 or int8");
            return cpu::fma_peak(threads, seconds, static_cast<cpu::Numbers>(found - names));
        },
        nb::arg("threads"), nb::arg("seconds"), nb::arg("numbers") = "float32", nb::call_guard<nb::gil_scoped_release>(),
        "Best rate in 1e9 operations a second (a multiply-add is two) of multiply-adds in registers on `threads` threads, "
        "over `seconds`, in the instruction that products of these numbers (float32, bfloat16, int8) use with chosen_isa().");
    cpu::bind_collectives(m);
    cpu::bind_streams(m);
    cpu::bind_float8(m);
    cpu::bind_graph(m);
    cpu::bind_layers(m);
    cpu::bind_linear(m);
    cpu::bind_lora(m);
    cpu::bind_attention(m);
    cpu::bind_moe(m);
    cpu::bind_moe_quantized(m);
    cpu::bind_quantized(m);
    cpu::bind_quantized_rows(m);
    cpu::bind_sampling(m);
    cpu::bind_states(m);
    cpu::bind_suffix_index(m);
}
