// What ranks compute together, as kernels of a recorded step. Tensors are addresses.
#pragma once

#include "cpu/kernels/floats.h"
#include "cpu/comm/ranks.h"

namespace quintet::cpu {

struct AllReduceCall {
    Ranks* team;
    void* out;  // [count], the sum over the ranks, from the first to the last; may be x
    const void* x;
    long count;
    FloatType type;
};

struct AllGatherCall {
    Ranks* team;
    void* out;      // [outer, ranks, bytes]
    const void* x;  // [outer, bytes]
    long outer, bytes;
};

struct BroadcastCall {
    Ranks* team;
    void* x;  // [bytes], the root's on every rank
    long bytes;
    int root;
};

void all_reduce(const AllReduceCall& call);
void all_gather(const AllGatherCall& call);
void broadcast(const BroadcastCall& call);

}  // namespace quintet::cpu
