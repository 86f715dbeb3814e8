// A sum over the ranks of one process for messages so small that NCCL's latency is most of what they take.
//
// Every rank's device reaches every other's memory (peer access). A rank copies what it brings to its region, tells the
// others, waits for them, and adds up everybody's in rank order: the same bits on every rank, every time. Unverified on
// a GPU.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { QUINTET_MAX_RANKS = 8, QUINTET_MAX_BYTES = 512 * 1024 };
enum { QUINTET_FLOAT32 = 0, QUINTET_FLOAT16 = 1, QUINTET_BFLOAT16 = 2 };

// All functions return a cudaError_t, 0 for success.

// Whether each of these devices reaches each other's memory: *reaches becomes 0 or 1. Makes no context.
int quintet_comm_reaches(const int* devices, int count, int* reaches);

// Makes the region of devices[rank], zeroed, and lets that device reach the others.
int quintet_comm_open(const int* devices, int count, int rank, void** region);

int quintet_comm_close(void* region);

// out = the sum over the ranks of x, `count` numbers each; bytes are a multiple of 16, and so are both addresses.
// `regions` are all ranks', in order. Queued on the stream; may be captured, since all that changes from call to call
// lies in the regions. Every rank must make the same calls in the same order.
int quintet_comm_all_reduce(void* const* regions, int rank, int ranks, const void* x, void* out, int64_t count,
                            int dtype, void* stream);

const char* quintet_comm_error(int code);

#ifdef __cplusplus
}
#endif
