// The cores and caches that this process may use.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace quintet::cpu {

struct Core {
    int node;               // of memory; 0 where there is one
    std::vector<int> cpus;  // its logical processors that may be used, ascending
};

struct Topology {
    std::vector<Core> cores;  // node after node
    bool whole_nodes;         // every processor of the nodes that they belong to may be used
};

// Of these logical processors. `root` holds cpu/ and node/ as Linux writes them; empty elsewhere, and each counts as a core.
Topology read_topology(const std::vector<int>& cpus, const std::string& root);

// The processors for a worker, numbered from 0, of so many threads: those of a core of its own. Empty, which means any,
// unless the process may use whole nodes and takes all of its cores: with fewer, another process may want the same ones.
std::vector<int> cpus_of_worker(const Topology& topology, int worker, int threads);

std::vector<int> allowed_cpus();   // logical processors in this thread's affinity, ascending
int physical_cores();              // cores that those belong to; at least 1
int64_t last_level_cache_bytes();  // summed over the caches that those cores reach; 0 when it is not known

// Of the processes that share a model, which one this is: their workers take cores apart. 0 of 1 at first.
void share_cores(int rank, int ranks);

// Keeps the calling thread to what cpus_of_worker() says, the workers of all ranks counted; on Linux, and where the system
// allows it.
void settle_worker(int worker, int threads);

}  // namespace quintet::cpu
