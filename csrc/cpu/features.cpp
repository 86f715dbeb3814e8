#include "cpu/features.h"

#include <atomic>
#include <cstdint>
#include <stdexcept>

#include "cpu/kernels/linear.h"
#include "cpu/kernels/quantized.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quintet::cpu {

namespace {

using Features = std::vector<std::pair<std::string, bool>>;

bool has(const Features& list, const char* name) {
    for (const auto& [key, value] : list) {
        if (key == name) return value;
    }
    return false;
}

#if defined(__x86_64__)

struct Registers {
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// All zero when the processor has no such leaf.
Registers cpuid(uint32_t leaf, uint32_t subleaf) {
    Registers r;
    if (__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx) == 0) return {};
    return r;
}

bool bit(uint64_t word, int n) { return (word >> n & 1U) != 0; }

// XCR0: which register states the operating system saves. Only to be read when CPUID says OSXSAVE.
uint64_t xcr0() {
    uint32_t low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
}

constexpr int kTileData = 18;

// Linux grants the tile registers per process, on request; this asks whether it would, and requests nothing.
bool tiles_granted() {
#if defined(__linux__)
    constexpr long kArchGetXcompSupp = 0x1021;  // arch_prctl: the states that may be requested
    uint64_t states = 0;
    return syscall(SYS_arch_prctl, kArchGetXcompSupp, &states) == 0 && bit(states, kTileData);
#else
    return true;
#endif
}

// Asks for the tile registers, for all threads of this process. Once they are granted, asking again changes nothing.
bool request_tiles() {
#if defined(__linux__)
    constexpr long kArchReqXcompPerm = 0x1023;  // arch_prctl
    return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
#else
    return true;
#endif
}

// Bits from Intel's Software Developer's Manual, volume 2A, CPUID, and volume 1, chapter 13 (XCR0).
Features detect() {
    const Registers one = cpuid(1, 0), seven = cpuid(7, 0);
    const Registers seven_one = seven.eax >= 1 ? cpuid(7, 1) : Registers{};
    const uint64_t saved = bit(one.ecx, 27) ? xcr0() : 0;
    const bool ymm = (saved & 0x6) == 0x6;                // XMM and upper YMM
    const bool zmm = ymm && (saved & 0xe0) == 0xe0;       // masks, upper ZMM, ZMM16..31
    const bool tmm = (saved & 0x60000) == 0x60000 && tiles_granted();  // tile configuration and tile data
    return {
        {"sse4_2", bit(one.ecx, 20)},
        {"avx", ymm && bit(one.ecx, 28)},
        {"f16c", ymm && bit(one.ecx, 29)},
        {"fma", ymm && bit(one.ecx, 12)},
        {"avx2", ymm && bit(seven.ebx, 5)},
        {"avx_vnni", ymm && bit(seven_one.eax, 4)},
        {"avx512f", zmm && bit(seven.ebx, 16)},
        {"avx512dq", zmm && bit(seven.ebx, 17)},
        {"avx512bw", zmm && bit(seven.ebx, 30)},
        {"avx512vl", zmm && bit(seven.ebx, 31)},
        {"avx512_vnni", zmm && bit(seven.ecx, 11)},
        {"avx512_bf16", zmm && bit(seven_one.eax, 5)},
        {"avx512_fp16", zmm && bit(seven.edx, 23)},
        {"amx_tile", tmm && bit(seven.edx, 24)},
        {"amx_int8", tmm && bit(seven.edx, 25)},
        {"amx_bf16", tmm && bit(seven.edx, 22)},
    };
}

#elif defined(__aarch64__)

// Bits from Linux's arch/arm64/include/uapi/asm/hwcap.h. NEON is part of the architecture.
Features detect() {
    uint64_t caps = 0, caps2 = 0;
#if defined(__linux__)
    caps = getauxval(AT_HWCAP);
    caps2 = getauxval(AT_HWCAP2);
#endif
    auto bit = [](uint64_t word, int n) { return (word >> n & 1U) != 0; };
    return {
        {"neon", true},
        {"asimdhp", bit(caps, 10)},   // fp16 arithmetic
        {"asimddp", bit(caps, 20)},   // int8 dot product
        {"sve", bit(caps, 22)},
        {"sve2", bit(caps2, 1)},
        {"i8mm", bit(caps2, 13)},
        {"bf16", bit(caps2, 14)},
    };
}

#else

Features detect() { return {}; }

#endif

bool has_avx2_vnni([[maybe_unused]] const Features& list) {
#if defined(__x86_64__)
    return has(list, "avx_vnni") && kQuantizedAvx2Vnni.multiply[kW8a8] != nullptr;  // see without_avx2_vnni.cpp
#else
    return false;
#endif
}

}  // namespace

Features features() { return detect(); }

Isa isa() {
    const Features f = detect();
#if defined(__x86_64__)
    const bool avx2 = has(f, "avx2") && has(f, "fma") && has(f, "f16c");
    if (!avx2) return Isa::baseline;
    const bool avx512 = has(f, "avx512f") && has(f, "avx512bw") && has(f, "avx512vl") && has(f, "avx512dq");
    const bool compiled = kLinearAvx512.multiply[0] != nullptr;  // see without_avx512.cpp
    if (!avx512 || !compiled) return has_avx2_vnni(f) ? Isa::avx2_vnni : Isa::avx2;
    if (!has(f, "avx512_bf16")) return Isa::avx512;
    const bool amx = has(f, "amx_tile") && has(f, "amx_int8") && has(f, "amx_bf16");
    return amx && request_tiles() ? Isa::amx : Isa::avx512_bf16;
#else
    if (!has(f, "neon")) return Isa::baseline;
    if (!has(f, "asimddp")) return Isa::neon;
    if (!has(f, "i8mm")) return Isa::neon_dotprod;
    return has(f, "bf16") ? Isa::neon_bf16 : Isa::neon_i8mm;
#endif
}

const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::neon: return "neon";
        case Isa::neon_dotprod: return "neon_dotprod";
        case Isa::neon_i8mm: return "neon_i8mm";
        case Isa::neon_bf16: return "neon_bf16";
        case Isa::avx2: return "avx2";
        case Isa::avx2_vnni: return "avx2_vnni";
        case Isa::avx512: return "avx512";
        case Isa::avx512_bf16: return "avx512_bf16";
        case Isa::amx: return "amx";
        case Isa::baseline: break;
    }
    return "baseline";
}

const char* arch() {
#if defined(__x86_64__)
    return "x86_64";
#elif defined(__aarch64__)
    return "aarch64";
#else
    return "other";
#endif
}

namespace {

constexpr Isa kIsas[] = {Isa::baseline, Isa::neon,      Isa::neon_dotprod, Isa::neon_i8mm,   Isa::neon_bf16,
                         Isa::avx2,     Isa::avx2_vnni, Isa::avx512,       Isa::avx512_bf16, Isa::amx};

bool is_neon(Isa isa) { return isa >= Isa::neon && isa <= Isa::neon_bf16; }

// baseline < avx2 < ... < amx, or baseline < neon < ... < neon_bf16: the enumeration's order.
std::atomic<int>& choice() {
    static std::atomic<int> chosen{static_cast<int>(isa())};
    return chosen;
}

}  // namespace

Isa chosen_isa() { return static_cast<Isa>(choice().load(std::memory_order_relaxed)); }

void choose_isa(const std::string& name) {
    const Isa best = isa();
    const bool dots = has_avx2_vnni(detect());  // which many processors with AVX-512 are without
    std::string known;
    for (const Isa each : kIsas) {
        const bool here = each <= best && (each == Isa::baseline || is_neon(each) == is_neon(best));
        if (!here || (each == Isa::avx2_vnni && !dots)) continue;
        if (name == isa_name(each)) {
            choice().store(static_cast<int>(each), std::memory_order_relaxed);
            return;
        }
        known += (known.empty() ? "" : ", ") + std::string(isa_name(each));
    }
    throw std::invalid_argument("instruction set '" + name + "' cannot be used here; there are " + known);
}

}  // namespace quintet::cpu
