// What the loops of ceiling_body.h need of AVX512.
#pragma once

#include <immintrin.h>

#include "cpu/kernels/ceiling.h"

namespace quintet::cpu {
namespace {

using Floats = __m512;
using Ints = __m512i;

constexpr size_t kChains = 24;  // thirty-two registers hold them and the two constants

Floats broadcast(float x) { return _mm512_set1_ps(x); }
Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
Ints load(const char* at) { return _mm512_load_si512(reinterpret_cast<const Ints*>(at)); }

float add_lanes(Floats x) {
    float lanes[16];
    _mm512_storeu_ps(lanes, x);
    float total = 0.0F;
    for (const float lane : lanes) total += lane;
    return total;
}

uint64_t fold(Ints x) {
    uint64_t lanes[8], digest = 0;
    _mm512_storeu_si512(reinterpret_cast<Ints*>(lanes), x);
    for (const uint64_t lane : lanes) digest ^= lane;
    return digest;
}

}  // namespace
}  // namespace quintet::cpu

#include "cpu/kernels/ceiling_body.h"
