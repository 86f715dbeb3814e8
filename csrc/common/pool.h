// The process's threads for kernels: they share out numbered parts of a job, spin a moment for the next one, then sleep.
#pragma once

namespace quintet {

using Job = void (*)(const void* context, int part, int parts);

// What a worker does first, numbered 1 to threads-1: it may choose its processor.
using Settle = void (*)(int worker, int threads);

// Runs job(context, part, parts) for every part in 0..parts-1, the caller's thread among those that take them, in order.
// A thread whose core is busy elsewhere may take none, and another take several: what is computed must not depend on who
// does a part, nor on `parts`; there may be fewer threads, if another engine asked for fewer since they were counted. One
// job runs at a time: a second caller waits.
void run_parts(Job job, const void* context, int parts);

// Jobs of several parts since the threads were started, modulo 2^32: each is a barrier for the thread that calls.
long shared_jobs();

// How many threads a job of the calling thread may have, its own included: as many as there are, or its limit. There is 1
// until more are set; at most 256.
int pool_threads();

// For the jobs of the calling thread from now on; 0 is no limit. Two models of one process want different numbers, and the
// threads stay as they are.
void limit_pool_threads(int threads);
void set_pool_threads(int threads, Settle settle = nullptr);

// A moment of waiting for another thread, the `spin`th: another process's thread may hold up the one that is waited for.
void wait_a_moment(unsigned spin);

struct Stretch {
    const void* at;
    long bytes;
};

constexpr int kMostAhead = 8;

// What the next jobs read of memory: threads that wait for one ask for it meanwhile, in this order, and it is in a cache
// when they come. At most kMostAhead stretches; they take the place of those before, and none forgets those. A wish: what
// lies there may be gone by then, and nothing depends on it.
void read_ahead(const Stretch* stretches, int count);

// Runs body(first, last) over 0..count-1 in contiguous stretches of at least `grain`.
template <typename Body>
static void parallel_for(long count, long grain, const Body& body) {
    struct Context {
        const Body* body;
        long count;
    };
    const long most = grain > 0 ? (count + grain - 1) / grain : count;
    const int threads = pool_threads();
    const int parts = most < threads ? static_cast<int>(most) : threads;
    if (parts <= 1) {
        if (count > 0) body(0L, count);
        return;
    }
    const Context context{&body, count};
    run_parts(
        [](const void* erased, int part, int of) {
            const Context& c = *static_cast<const Context*>(erased);
            const long first = c.count * part / of;
            const long last = c.count * (part + 1) / of;
            if (first < last) (*c.body)(first, last);
        },
        &context, parts);
}

}  // namespace quintet
