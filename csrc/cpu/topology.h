// The cores and caches that this process may use.
#pragma once

#include <cstdint>
#include <vector>

namespace quintet::cpu {

std::vector<int> allowed_cpus();      // logical processors in this process's affinity, ascending
int physical_cores();                 // cores that those belong to; at least 1
int64_t last_level_cache_bytes();     // summed over the caches that those cores reach; 0 when it is not known

}  // namespace quintet::cpu
