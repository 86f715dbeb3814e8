#include "cpu/topology.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace quintet::cpu {

namespace {

constexpr int kMostCpus = 1 << 16;

// First line of the file with its end, or empty.
std::string first_line(const std::string& path) {
    std::FILE* file = std::fopen(path.c_str(), "re");
    if (file == nullptr) return {};
    char line[4096] = {};  // a list of processors with many holes
    const bool read = std::fgets(line, sizeof line, file) != nullptr;
    std::fclose(file);
    return read ? line : "";
}

// "0-3,8,10-11" as numbers; what is no such list ends it.
std::vector<int> numbers_of(const std::string& list) {
    std::vector<int> numbers;
    const char* at = list.c_str();
    for (;;) {
        int first = 0, last = 0, read = 0;
        if (std::sscanf(at, "%d%n", &first, &read) < 1 || first < 0) return numbers;
        at += read;
        last = first;
        if (*at == '-') {
            if (std::sscanf(at + 1, "%d%n", &last, &read) < 1 || last < first || last - first > kMostCpus) return numbers;
            at += 1 + read;
        }
        for (int number = first; number <= last; ++number) numbers.push_back(number);
        if (*at != ',') return numbers;
        ++at;
    }
}

// Each node's processors; one node of all where the system names none.
std::map<int, std::vector<int>> nodes_of(const std::string& root) {
    std::map<int, std::vector<int>> nodes;
    for (const int node : numbers_of(first_line(root + "/node/online"))) {
        nodes[node] = numbers_of(first_line(root + "/node/node" + std::to_string(node) + "/cpulist"));
    }
    if (nodes.empty()) nodes[0] = numbers_of(first_line(root + "/cpu/online"));
    return nodes;
}

#if defined(__linux__)

const char* const kSystem = "/sys/devices/system";

std::string sysfs(int cpu, const std::string& name) {
    return first_line(std::string(kSystem) + "/cpu/cpu" + std::to_string(cpu) + "/" + name);
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
    for (int count = 1024; count <= kMostCpus && cpus.empty(); count *= 2) {  // more processors than cpu_set_t holds
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

Topology read_topology(const std::vector<int>& cpus, const std::string& root) {
    const std::set<int> allowed(cpus.begin(), cpus.end());
    std::map<int, int> node_of;
    bool whole = true;
    for (const auto& [node, members] : nodes_of(root)) {
        size_t usable = 0;
        for (const int cpu : members) {
            usable += allowed.count(cpu);
            node_of[cpu] = node;
        }
        whole = whole && (usable == 0 || usable == members.size());
    }
    std::map<std::pair<int, int>, Core> cores;  // by node and first sibling
    for (const int cpu : allowed) {
        const std::string list = first_line(root + "/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
        const std::vector<int> siblings = numbers_of(list);
        const auto found = node_of.find(cpu);
        whole = whole && found != node_of.end();
        const int node = found == node_of.end() ? 0 : found->second;
        Core& core = cores[{node, siblings.empty() ? cpu : siblings.front()}];
        core.node = node;
        core.cpus.push_back(cpu);
    }
    Topology topology{{}, whole};
    for (auto& [key, core] : cores) topology.cores.push_back(std::move(core));
    return topology;
}

std::vector<int> cpus_of_worker(const Topology& topology, int worker, int threads) {
    const int cores = static_cast<int>(topology.cores.size());
    if (!topology.whole_nodes || threads != cores || worker < 0 || worker >= cores) return {};
    return topology.cores[static_cast<size_t>(worker)].cpus;
}

namespace {
std::atomic<int> our_rank{0}, our_ranks{1};
}

void share_cores(int rank, int ranks) {
    our_rank = rank;
    our_ranks = ranks;
}

void settle_worker([[maybe_unused]] int worker, [[maybe_unused]] int threads) {
#if defined(__linux__)
    const int before = our_rank * threads, all = our_ranks * threads;
    const std::vector<int> cpus = cpus_of_worker(read_topology(allowed_cpus(), kSystem), before + worker, all);
    if (cpus.empty()) return;
    const size_t count = static_cast<size_t>(cpus.back()) + 1;
    cpu_set_t* set = CPU_ALLOC(count);
    if (set == nullptr) return;
    const size_t bytes = CPU_ALLOC_SIZE(count);
    CPU_ZERO_S(bytes, set);
    for (const int cpu : cpus) CPU_SET_S(static_cast<size_t>(cpu), bytes, set);
    pthread_setaffinity_np(pthread_self(), bytes, set);  // refused: it works without
    CPU_FREE(set);
#endif
}

int physical_cores() {
#if defined(__linux__)
    return static_cast<int>(read_topology(allowed_cpus(), kSystem).cores.size());
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
