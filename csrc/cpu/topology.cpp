#include "cpu/topology.h"

#include <algorithm>
#include <cstdio>
#include <set>
#include <string>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace quintet::cpu {

namespace {

#if defined(__linux__)

// First line of /sys/devices/system/cpu/cpu<cpu>/<name>, or empty.
std::string sysfs(int cpu, const std::string& name) {
    const std::string path = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/" + name;
    std::FILE* file = std::fopen(path.c_str(), "re");
    if (file == nullptr) return {};
    char line[256] = {};
    const bool read = std::fgets(line, sizeof line, file) != nullptr;
    std::fclose(file);
    std::string text = read ? line : "";
    while (!text.empty() && text.back() == '\n') text.pop_back();
    return text;
}

// "32768K" and "32M" as bytes; 0 when it is neither.
int64_t cache_bytes(const std::string& size) {
    long long number = 0;
    char unit = ' ';
    if (std::sscanf(size.c_str(), "%lld%c", &number, &unit) < 1 || number < 0) return 0;
    if (unit == 'K') return number << 10;
    if (unit == 'M') return number << 20;
    return number;
}

#endif

#if defined(__APPLE__)

int64_t sysctl_number(const char* name) {
    int64_t value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 ? value : 0;
}

#endif

}  // namespace

std::vector<int> allowed_cpus() {
    std::vector<int> cpus;
#if defined(__linux__)
    for (int count = 1024; count <= 1 << 16 && cpus.empty(); count *= 2) {  // more processors than cpu_set_t holds
        cpu_set_t* set = CPU_ALLOC(static_cast<size_t>(count));
        if (set == nullptr) break;
        const size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(count));
        if (sched_getaffinity(0, bytes, set) == 0) {
            for (int cpu = 0; cpu < count; ++cpu) {
                if (CPU_ISSET_S(static_cast<size_t>(cpu), bytes, set)) cpus.push_back(cpu);
            }
        }
        CPU_FREE(set);
    }
#endif
    if (cpus.empty()) {
        const int count = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
        for (int cpu = 0; cpu < count; ++cpu) cpus.push_back(cpu);
    }
    return cpus;
}

int physical_cores() {
#if defined(__linux__)
    std::set<std::string> cores;
    for (const int cpu : allowed_cpus()) {
        const std::string siblings = sysfs(cpu, "topology/thread_siblings_list");
        cores.insert(siblings.empty() ? "cpu" + std::to_string(cpu) : siblings);
    }
    return static_cast<int>(cores.size());
#elif defined(__APPLE__)
    return static_cast<int>(std::max<int64_t>(1, sysctl_number("hw.physicalcpu")));
#else
    return static_cast<int>(allowed_cpus().size());
#endif
}

int64_t last_level_cache_bytes() {
#if defined(__linux__)
    std::set<std::string> seen;
    int64_t total = 0;
    for (const int cpu : allowed_cpus()) {
        std::string last;
        for (int index = 0; index < 8; ++index) {  // levels are listed in ascending order
            const std::string cache = "cache/index" + std::to_string(index);
            if (sysfs(cpu, cache + "/size").empty()) break;
            last = cache;
        }
        if (last.empty()) continue;
        if (seen.insert(sysfs(cpu, last + "/shared_cpu_list")).second) total += cache_bytes(sysfs(cpu, last + "/size"));
    }
    return total;
#elif defined(__APPLE__)
    return std::max(sysctl_number("hw.l3cachesize"), sysctl_number("hw.l2cachesize"));
#else
    return 0;
#endif
}

}  // namespace quintet::cpu
