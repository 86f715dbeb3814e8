#include "cpu/elementwise/norm.h"

#include "cpu/rows.h"

namespace quintet::cpu {

namespace {

void run(void (*kernel)(const NormCall&, long, long), const NormCall& call) {
    for_rows(call.rows, call.width * size_of(call.type), [&](long first, long last) { kernel(call, first, last); });
}

}  // namespace

void rms_norm(const NormCall& call) { run(QUINTET_KERNELS(kNorm).rms[call.type], call); }

void layer_norm(const NormCall& call) { run(QUINTET_KERNELS(kNorm).layer[call.type], call); }

}  // namespace quintet::cpu
