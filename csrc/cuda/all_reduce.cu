#include "all_reduce.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cuda/atomic>

namespace {

constexpr int kBlocks = 32;   // at most: all must be resident, since they wait for each other's like on other devices
constexpr int kThreads = 512;

// What a device shares. A block speaks to the blocks of the same number alone.
struct Region {
  // arrived[b][r]: the turn that block b of rank r has brought its part for; written by that rank
  alignas(128) uint32_t arrived[kBlocks][QUINTET_MAX_RANKS];
  alignas(128) uint32_t turn[kBlocks];  // of the own blocks' last call: it lives here so that a replay counts on
  // Two, taken in turns. Who is a call ahead has seen everybody begin this one, so nobody reads the one before any more.
  alignas(128) unsigned char data[2][QUINTET_MAX_BYTES];
};

struct Regions {
  Region* of[QUINTET_MAX_RANKS];
};

using Flag = cuda::atomic_ref<uint32_t, cuda::thread_scope_system>;

__device__ float widened(float x) { return x; }
__device__ float widened(__half x) { return __half2float(x); }
__device__ float widened(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void narrow(float x, float& to) { to = x; }
__device__ void narrow(float x, __half& to) { to = __float2half_rn(x); }
__device__ void narrow(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }

template <typename T>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(T);
  T of[kSize];
};

// Block b of every rank has brought its part of this turn.
__device__ void meet(const Regions& regions, int rank, int ranks, uint32_t turn) {
  __syncthreads();
  const int other = static_cast<int>(threadIdx.x);
  if (other < ranks) {
    __threadfence_system();  // what the block's other threads wrote goes before the flag
    Flag(regions.of[other]->arrived[blockIdx.x][rank]).store(turn, cuda::memory_order_release);
    const Flag theirs(regions.of[rank]->arrived[blockIdx.x][other]);
    // a difference, so that the count may run over; one who is ahead has brought this turn's part too
    while (static_cast<int32_t>(theirs.load(cuda::memory_order_acquire) - turn) < 0) {
    }
  }
  __syncthreads();
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    sum_kernel(const __grid_constant__ Regions regions, int rank, int ranks, const Vector<T>* x, Vector<T>* out,
               int vectors) {
  Region* own = regions.of[rank];
  const uint32_t turn = own->turn[blockIdx.x] + 1;
  const int half = static_cast<int>(turn & 1);
  const int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  auto* brought = reinterpret_cast<Vector<T>*>(own->data[half]);
  for (int i = first; i < vectors; i += step) brought[i] = x[i];
  meet(regions, rank, ranks, turn);
  for (int i = first; i < vectors; i += step) {
    float sums[Vector<T>::kSize] = {};
    for (int r = 0; r < ranks; ++r) {
      const Vector<T> part = reinterpret_cast<const Vector<T>*>(regions.of[r]->data[half])[i];
#pragma unroll
      for (int k = 0; k < Vector<T>::kSize; ++k) sums[k] += widened(part.of[k]);
    }
    Vector<T> sum;
#pragma unroll
    for (int k = 0; k < Vector<T>::kSize; ++k) narrow(sums[k], sum.of[k]);
    out[i] = sum;
  }
  if (threadIdx.x == 0) own->turn[blockIdx.x] = turn;
}

template <typename T>
cudaError_t launch(const Regions& regions, int rank, int ranks, const void* x, void* out, int64_t count,
                   cudaStream_t stream) {
  const int vectors = static_cast<int>(count / Vector<T>::kSize);
  const int wanted = (vectors + kThreads - 1) / kThreads;
  const int blocks = wanted < kBlocks ? wanted : kBlocks;  // of the size alone: the same on every rank
  sum_kernel<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      regions, rank, ranks, static_cast<const Vector<T>*>(x), static_cast<Vector<T>*>(out), vectors);
  return cudaGetLastError();
}

bool fits(int64_t count, int dtype) {
  const int64_t bytes = count * (dtype == QUINTET_FLOAT32 ? 4 : 2);
  return bytes > 0 && bytes <= QUINTET_MAX_BYTES && bytes % 16 == 0;
}

}  // namespace

extern "C" {

int quintet_comm_reaches(const int* devices, int count, int* reaches) {
  *reaches = 1;
  for (int a = 0; a < count; ++a) {
    for (int b = 0; b < count; ++b) {
      if (devices[a] == devices[b]) continue;
      int reached = 0;
      const cudaError_t error = cudaDeviceCanAccessPeer(&reached, devices[a], devices[b]);
      if (error != cudaSuccess) return error;
      *reaches = *reaches && reached;
    }
  }
  return cudaSuccess;
}

int quintet_comm_open(const int* devices, int count, int rank, void** region) {
  if (count < 1 || count > QUINTET_MAX_RANKS || rank < 0 || rank >= count) return cudaErrorInvalidValue;
  cudaError_t error = cudaSetDevice(devices[rank]);
  for (int other = 0; other < count && error == cudaSuccess; ++other) {
    if (devices[other] == devices[rank]) continue;
    error = cudaDeviceEnablePeerAccess(devices[other], 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();  // it stays set otherwise
      error = cudaSuccess;
    }
  }
  if (error == cudaSuccess) error = cudaMalloc(region, sizeof(Region));
  if (error == cudaSuccess) error = cudaMemset(*region, 0, sizeof(Region));
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  return error;
}

int quintet_comm_close(void* region) { return cudaFree(region); }

int quintet_comm_all_reduce(void* const* regions, int rank, int ranks, const void* x, void* out, int64_t count,
                            int dtype, void* stream) {
  if (ranks < 1 || ranks > QUINTET_MAX_RANKS || rank < 0 || rank >= ranks || !fits(count, dtype)) {
    return cudaErrorInvalidValue;
  }
  Regions all = {};
  for (int r = 0; r < ranks; ++r) all.of[r] = static_cast<Region*>(regions[r]);
  const auto queue = static_cast<cudaStream_t>(stream);
  switch (dtype) {
    case QUINTET_FLOAT32: return launch<float>(all, rank, ranks, x, out, count, queue);
    case QUINTET_FLOAT16: return launch<__half>(all, rank, ranks, x, out, count, queue);
    case QUINTET_BFLOAT16: return launch<__nv_bfloat16>(all, rank, ranks, x, out, count, queue);
    default: return cudaErrorInvalidValue;
  }
}

const char* quintet_comm_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

}  // extern "C"
