// What this processor can execute, and what the operating system lets it.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace quintet::cpu {

// Names as in Linux's /proc/cpuinfo. A feature is true only when the processor has it and the operating system saves its
// registers. Every name of this architecture is present, true or false.
std::vector<std::pair<std::string, bool>> features();

enum class Isa { baseline, neon, neon_dotprod, neon_i8mm, neon_bf16, avx2, avx2_vnni, avx512, avx512_bf16, amx };

Isa isa();                   // the best set that all of our kernels for it may use
const char* isa_name(Isa isa);

Isa chosen_isa();            // what kernels are picked for: isa(), or a lower one that was asked for
// Throws std::invalid_argument for a name that is not known or is beyond what the processor has. For kernels that run
// from now on; not while one runs.
void choose_isa(const std::string& name);
const char* arch();          // "x86_64", "aarch64" or "other"

}  // namespace quintet::cpu
