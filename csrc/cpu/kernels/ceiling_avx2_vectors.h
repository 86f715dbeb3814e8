// What the loops of ceiling_body.h need of AVX2.
#pragma once

#include <immintrin.h>

#include "cpu/kernels/ceiling.h"

namespace quintet::cpu {
namespace {

using Floats = __m256;
using Ints = __m256i;

constexpr size_t kChains = 12;  // sixteen registers hold them and the two constants

Floats broadcast(float x) { return _mm256_set1_ps(x); }
Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
Ints load(const char* at) { return _mm256_load_si256(reinterpret_cast<const Ints*>(at)); }

float add_lanes(Floats x) {
    float lanes[8];
    _mm256_storeu_ps(lanes, x);
    float total = 0.0F;
    for (const float lane : lanes) total += lane;
    return total;
}

uint64_t fold(Ints x) {
    uint64_t lanes[4], digest = 0;
    _mm256_storeu_si256(reinterpret_cast<Ints*>(lanes), x);
    for (const uint64_t lane : lanes) digest ^= lane;
    return digest;
}

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/ceiling_body.h"
