#include "cpu/graph.h"

#include <algorithm>

#include "cpu/topology.h"

namespace quintet::cpu {

namespace {

// Bytes that are read ahead of the next step while the host is busy with this one's result: so much of the caches is left
// to the host.
long most_ahead() {
    static const long bytes = static_cast<long>(last_level_cache_bytes()) / 4;
    return bytes;
}

}  // namespace

void Graph::run() const {
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
        const Node& node = nodes_[i];
        if (node.weights.bytes > 0) ask_for(i + 1, most_ahead(), 1);
        node.invoke(node.kernel, &memory_[node.at]);
    }
    ask_for(0, most_ahead(), kMostAhead);
}

// The weights of the next products from a node on: of so many, and at most so many bytes.
void Graph::ask_for(std::size_t node, long bytes, int most) const {
    Stretch ahead[kMostAhead];
    int count = 0;
    for (; node < nodes_.size() && count < most && bytes > 0; ++node) {
        const Stretch& weights = nodes_[node].weights;
        if (weights.bytes == 0) continue;
        ahead[count++] = {weights.at, std::min(weights.bytes, bytes)};
        bytes -= weights.bytes;
    }
    read_ahead(ahead, count);
}

Graph*& recording() {
    thread_local Graph* graph = nullptr;
    return graph;
}

}  // namespace quintet::cpu
