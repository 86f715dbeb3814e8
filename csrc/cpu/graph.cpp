#include "cpu/graph.h"

namespace quintet::cpu {

Graph*& recording() {
    thread_local Graph* graph = nullptr;
    return graph;
}

}  // namespace quintet::cpu
