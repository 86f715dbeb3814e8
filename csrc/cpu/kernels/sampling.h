// The loops over a whole row of logits that sampling spends its time in, one object for each instruction set.
//
// These files are compiled with flags that the processor at hand may not obey: see ceiling.h for what they may include.
// Rows need no alignment, and nothing is read past their ends.
#pragma once

#include <stdint.h>

namespace quintet::cpu {

constexpr long kSamplingBlock = 128;  // tokens whose largest logit is kept, to leave out those that cannot matter

// Floats of 16 or 32 bits as whole numbers: sign and size become one signed number, in the floats' order.
struct Largest {
    int32_t key;    // of the largest
    uint32_t size;  // the bits of the largest magnitude: above those of infinity if there is a NaN
    long at;        // the first place of the key
};

// Whose random numbers; see quintet/ops/random.py.
struct NoiseOf {
    uint32_t key[2], position;
};

// What a token of a block must have to be looked at: a logit and a random word of at least this.
struct Bar {
    float logit;
    uint32_t word;
};

struct Hit {
    int32_t token;
    uint32_t word;
};

struct SamplingKernels {
    Largest (*largest16)(const int16_t* row, long count);
    Largest (*largest32)(const int32_t* row, long count);
    // The largest of each block; false if there is a NaN, and then they may be anything.
    bool (*maxima)(const float* row, long count, float* maxima);
    // The sum of exp(row - largest), in one order: a token's lane is its id modulo 16.
    double (*exp_sum)(const float* row, long count, float largest);
    // mass = exp(row / temperature - largest) where row / temperature >= least, elsewhere 0. -> their sum
    double (*masses)(const float* row, long count, float temperature, float least, float largest, float* mass);
    // Tokens of the block at `first` that reach the bar, in order; `hits` has room for a block. -> how many
    long (*hits)(const float* row, long count, long first, const NoiseOf& noise, const Bar& bar, Hit* hits);
};

extern const SamplingKernels kSamplingBaseline;
#if defined(__x86_64__)
extern const SamplingKernels kSamplingAvx2;
extern const SamplingKernels kSamplingAvx512;
#endif

}  // namespace quintet::cpu
