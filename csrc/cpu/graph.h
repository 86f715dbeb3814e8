// Calls of kernels as plain data: a step that was run once can be run again without Python.
//
// A bind_*.cpp hands its kernels over through submit(). What a call points at must stay where it is as long as the graph
// lives: arena.py sees to that on the side of Python.
#pragma once

#include <cstddef>
#include <cstring>
#include <type_traits>
#include <vector>

#include "common/pool.h"

namespace quintet::cpu {

// What a call reads of memory whatever its inputs are: the weights of a product say so beside their calls.
template <typename Call>
Stretch weights_of(const Call&) {
    return {nullptr, 0};
}

class Graph {
public:
    template <typename Call>
    void add(void (*kernel)(const Call&), const Call& call) {
        static_assert(std::is_trivially_copyable_v<Call>, "a call is plain data");
        static_assert(alignof(Call) <= alignof(std::max_align_t));
        const std::size_t at = memory_.size();
        memory_.resize(at + (sizeof(Call) + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
        std::memcpy(&memory_[at], &call, sizeof(Call));
        nodes_.push_back({reinterpret_cast<Erased>(kernel),
                          [](Erased erased, const void* arguments) {
                              reinterpret_cast<void (*)(const Call&)>(erased)(*static_cast<const Call*>(arguments));
                          },
                          at, weights_of(call)});
    }

    // All calls again, in order. Weights are read ahead: a product's while other kernels run, the first ones' after the end.
    void run() const;

    long size() const { return static_cast<long>(nodes_.size()); }

private:
    void ask_for(std::size_t node, long bytes, int most) const;

    using Erased = void (*)();
    struct Node {
        Erased kernel;
        void (*invoke)(Erased kernel, const void* call);
        std::size_t at;  // of the call in memory_
        Stretch weights;
    };
    std::vector<Node> nodes_;
    std::vector<std::max_align_t> memory_;
};

// The graph that this thread's calls are added to; null where nothing is recorded.
Graph*& recording();

// Runs kernel(call), and adds it to the graph that is recorded. What throws is not added.
template <typename Call>
void submit(void (*kernel)(const Call&), const Call& call) {
    kernel(call);
    if (Graph* const graph = recording()) graph->add(kernel, call);
}

}  // namespace quintet::cpu
