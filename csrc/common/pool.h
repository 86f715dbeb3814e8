// The process's threads for kernels: they share out numbered parts of a job, spin a moment for the next one, then sleep.
#pragma once

namespace quintet {

using Job = void (*)(const void* context, int part, int parts);

// Runs job(context, part, parts) for every part in 0..parts-1, on as many threads at once, the caller's among them.
// `parts` is at most pool_threads(). What a part computes must not depend on `parts`: callers share out whole outputs.
// One job runs at a time: a second caller waits.
void run_parts(Job job, const void* context, int parts);

// How many threads there are, the caller's included; 1 until it is set. At most 256.
int pool_threads();
void set_pool_threads(int threads);

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
