// Runs the compiled sources without Python, so that the sanitizers can watch them. Exits with the number of failures.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common/pool.h"
#include "common/share.h"
#include "common/team.h"
#include "cpu/ceilings.h"
#include "cpu/features.h"
#include "cpu/kernels/ceiling.h"
#include "cpu/topology.h"

namespace cpu = quintet::cpu;

int attention_failures();  // attention_test.cpp
int blocks_failures();     // blocks_test.cpp
int float8_failures();     // float8_test.cpp
int linear_failures();     // linear_test.cpp
int lora_failures();       // lora_test.cpp
int moe_failures();        // moe_test.cpp
int quantized_failures();  // quantized_test.cpp
int quantized_rows_failures();  // quantized_rows_test.cpp
int suffix_index_failures();  // suffix_index_test.cpp
int team_failures();         // team_test.cpp
int whole_attention_failures();  // whole_attention_test.cpp

namespace {

int failures = 0;

void expect(bool holds, const char* claim) {
    if (holds) return;
    std::fprintf(stderr, "FAILED: %s\n", claim);
    ++failures;
}

template <typename Call>
bool refuses(Call call) {
    try {
        call();
    } catch (const std::invalid_argument&) {
        return true;
    }
    return false;
}

// The digest is the exclusive or of every 8 bytes: any line left out or read twice shows.
void read_covers_every_line(const cpu::CeilingKernels& kernel) {
    constexpr size_t kWords = 8;  // in a line
    for (size_t lines : {0, 1, 2, 3, 4, 5, 7, 8, 63, 64, 65}) {
        std::vector<uint64_t> buffer((lines + 2) * kWords, 0);
        uint64_t* data = buffer.data();
        while (reinterpret_cast<uintptr_t>(data) % 64 != 0) ++data;
        uint64_t digest = 0;
        for (size_t i = 0; i < lines * kWords; ++i) {
            data[i] = (i + 1) * 0x9e3779b97f4a7c15ULL;
            digest ^= data[i];
        }
        expect(kernel.read(data, lines) == digest, "read covers every line once");
    }
}

void kernels_compute(const cpu::CeilingKernels& kernel) {
    read_covers_every_line(kernel);
    for (const cpu::MultiplyLoop& loop : kernel.multiply) {
        expect(loop.adds >= 1, "a round computes");
        const float digest = loop.run(200);
        expect(std::isfinite(digest) && digest >= 1.0F, "multiply-adds stay numbers");
    }
    const float fixed_point = kernel.multiply[cpu::kFloat32].run(20000);  // a sum of x that went to 1
    expect(std::isfinite(fixed_point) && fixed_point > 1.0F, "multiply-adds converge");
}

void team_keeps_step() {
    constexpr int kThreads = 5;
    std::vector<int> rounds(kThreads, 0), prepared(kThreads, 0);
    const double best = quintet::shortest_round(
        kThreads, 0.01, [&](int i) { ++prepared[static_cast<size_t>(i)]; },
        [&](int i) { ++rounds[static_cast<size_t>(i)]; });
    expect(best >= 0.0 && best < 1.0, "a round takes a time");
    for (int i = 0; i < kThreads; ++i) {
        expect(prepared[static_cast<size_t>(i)] == 1, "every member prepares once");
        expect(rounds[static_cast<size_t>(i)] == rounds[0] && rounds[0] >= 3, "every member plays every round");
    }
}

// Each number is visited once, whatever the number of threads and of parts; jobs follow each other at once and after a
// pause in which the threads have gone to sleep.
void pool_shares_out() {
    for (const int threads : {1, 2, 5, 3}) {
        quintet::set_pool_threads(threads);
        expect(quintet::pool_threads() == threads, "the pool has the threads that were asked for");
        for (int turn = 0; turn < 300; ++turn) {
            const long count = turn % 23;
            std::vector<int> visits(static_cast<size_t>(count), 0);
            quintet::parallel_for(count, 1 + turn % 3, [&](long first, long last) {
                for (long i = first; i < last; ++i) ++visits[static_cast<size_t>(i)];
            });
            for (const int visited : visits) expect(visited == 1, "every number is visited once");
            if (turn % 100 == 99) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
    }
    std::vector<std::thread> callers;  // they wait for each other
    std::atomic<long> total{0};
    for (int i = 0; i < 3; ++i) {
        callers.emplace_back([&total] {
            for (int turn = 0; turn < 50; ++turn) {
                quintet::parallel_for(10, 1, [&](long first, long last) { total += last - first; });
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
    expect(total == 3 * 50 * 10, "several callers are served in turn");
    expect(refuses([] { quintet::set_pool_threads(0); }), "a pool without threads is refused");
    quintet::set_pool_threads(1);
}

// With more parts than items, than threads and than the caller may have, and after pauses that a thread sleeps through.
void items_are_shared_out() {
    for (const int threads : {1, 2, 5, 3}) {
        quintet::set_pool_threads(threads);
        const long jobs = quintet::shared_jobs();
        for (int turn = 0; turn < 300; ++turn) {
            const long items = turn % 29, parts = 1 + turn % 7;
            std::vector<int> visits(static_cast<size_t>(items), 0);
            quintet::limit_pool_threads(turn % 4);
            quintet::share_out(items, parts, [&](long i) { ++visits[static_cast<size_t>(i)]; });
            for (const int visited : visits) expect(visited == 1, "every item is visited once");
            if (turn % 20 == 19) std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
        expect((quintet::shared_jobs() != jobs) == (threads > 1), "jobs of several parts are counted");
    }
    quintet::limit_pool_threads(0);
    quintet::set_pool_threads(1);
}

// Threads that wait read what is announced, exchanged in the middle of it too, and memory that is no more; no job notices.
void waiting_threads_read_ahead() {
    quintet::set_pool_threads(4);
    std::vector<char> there(1 << 20, 1);
    const quintet::Stretch gone{reinterpret_cast<const void*>(uintptr_t{1} << 40), 1 << 20};
    std::vector<quintet::Stretch> all(quintet::kMostAhead, {there.data(), static_cast<long>(there.size())});
    all[1] = gone;
    for (int turn = 0; turn < 500; ++turn) {
        quintet::read_ahead(all.data(), turn % (quintet::kMostAhead + 1));
        if (turn % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        std::atomic<long> total{0};
        quintet::parallel_for(20, 1, [&](long first, long last) { total += last - first; });
        expect(total == 20, "a job is done while memory is asked for");
    }
    expect(std::count(there.begin(), there.end(), 1) == 1 << 20, "what was read ahead is as it was");
    quintet::set_pool_threads(1);
}

// A small model beside a large one: its thread takes no help, the other's all, and no thread is started or ended.
void a_limit_is_the_callers_alone() {
    quintet::set_pool_threads(3);
    quintet::limit_pool_threads(1);
    expect(quintet::pool_threads() == 1, "the caller's jobs have so many threads as it said");
    const std::thread::id own = std::this_thread::get_id();
    quintet::parallel_for(50, 1, [&](long, long) {
        expect(std::this_thread::get_id() == own, "one thread is the caller's own");
    });
    std::thread([] { expect(quintet::pool_threads() == 3, "another thread has no limit"); }).join();
    quintet::limit_pool_threads(9);
    expect(quintet::pool_threads() == 3, "a limit gives no threads");
    quintet::limit_pool_threads(0);
    expect(quintet::pool_threads() == 3, "0 is no limit");
    expect(refuses([] { quintet::limit_pool_threads(-1); }), "a limit below 0 is refused");
    quintet::set_pool_threads(1);
}

// Two engines of one process want different numbers of threads: one may ask for fewer while a job of the other begins.
void pool_may_shrink_under_a_job() {
    std::atomic<bool> over{false};
    std::thread other([&over] {
        for (int turn = 0; !over.load(); ++turn) quintet::set_pool_threads(1 + turn % 3);
    });
    for (int turn = 0; turn < 2000; ++turn) {
        std::vector<int> visits(8, 0);
        quintet::parallel_for(8, 1, [&](long first, long last) {
            for (long i = first; i < last; ++i) ++visits[static_cast<size_t>(i)];
        });
        for (const int visited : visits) expect(visited == 1, "every number is visited once, by however many threads");
    }
    over.store(true);
    other.join();
    quintet::set_pool_threads(1);
}

// A worker that is held up takes no part, and nobody waits for it; those who are there do all of them.
void pool_does_without_late_workers() {
    static std::atomic<bool> held{true};
    quintet::set_pool_threads(4, [](int worker, int) {
        while (worker > 1 && held.load()) std::this_thread::yield();
    });
    for (int turn = 0; turn < 200; ++turn) {
        std::vector<int> visits(64, 0);
        quintet::parallel_for(64, 1, [&](long first, long last) {
            for (long i = first; i < last; ++i) ++visits[static_cast<size_t>(i)];
        });
        for (const int visited : visits) expect(visited == 1, "every number is visited once, without two of the workers");
        if (turn == 100) held.store(false);  // they come in the midst of jobs
    }
    quintet::set_pool_threads(1);
}

// A tree as Linux has it: each processor's siblings, and each node's processors.
class Tree {
public:
    Tree(const std::map<int, std::string>& siblings, const std::map<int, std::string>& nodes, const char* online)
        : root_(std::filesystem::temp_directory_path() / ("quintet-topology-" + std::to_string(made()++))) {
        std::filesystem::remove_all(root_);
        write("cpu/online", online);
        for (const auto& [cpu, list] : siblings) {
            write("cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list", list);
        }
        for (const auto& [node, list] : nodes) write("node/node" + std::to_string(node) + "/cpulist", list);
        if (!nodes.empty()) write("node/online", "0-" + std::to_string(nodes.rbegin()->first));
    }
    ~Tree() { std::filesystem::remove_all(root_); }
    Tree(const Tree&) = delete;
    Tree& operator=(const Tree&) = delete;

    cpu::Topology read(const std::vector<int>& cpus) const { return cpu::read_topology(cpus, root_.string()); }

private:
    static int& made() {
        static int count = static_cast<int>(reinterpret_cast<uintptr_t>(&count) >> 12 & 0xffff);
        return count;
    }
    void write(const std::string& name, const std::string& text) const {
        std::filesystem::create_directories((root_ / name).parent_path());
        std::ofstream(root_ / name) << text << "\n";
    }

    std::filesystem::path root_;
};

// Two nodes of two cores of two threads each, numbered as servers do: siblings stand half the machine apart.
void topology_reads_nodes_and_siblings() {
    const Tree tree({{0, "0,4"}, {1, "1,5"}, {2, "2,6"}, {3, "3,7"}, {4, "0,4"}, {5, "1,5"}, {6, "2,6"}, {7, "3,7"}},
                    {{0, "0,2,4,6"}, {1, "1,3,5,7"}}, "0-7");
    const cpu::Topology all = tree.read({0, 1, 2, 3, 4, 5, 6, 7});
    expect(all.cores.size() == 4 && all.whole_nodes, "siblings count once");
    expect(cpu::cpus_of_worker(all, 0, 4) == std::vector<int>({0, 4}), "the first node is filled first");
    expect(cpu::cpus_of_worker(all, 1, 4) == std::vector<int>({2, 6}), "then its other cores");
    expect(cpu::cpus_of_worker(all, 2, 4) == std::vector<int>({1, 5}) && all.cores[2].node == 1, "then the next node");
    expect(cpu::cpus_of_worker(all, 1, 3).empty(), "fewer threads than cores go where they like");
    expect(cpu::cpus_of_worker(all, 4, 4).empty(), "there is no core for a worker too many");
    const cpu::Topology node = tree.read({1, 3, 5, 7});
    expect(node.cores.size() == 2 && node.whole_nodes, "one node may be all that is allowed");
    expect(cpu::cpus_of_worker(node, 0, 2) == std::vector<int>({1, 5}), "and its cores are used");
    const cpu::Topology holes = tree.read({0, 2, 3, 7});
    expect(holes.cores.size() == 3 && !holes.whole_nodes, "a set with holes is no whole node");
    expect(cpu::cpus_of_worker(holes, 0, 3).empty(), "and nobody is bound in it");
}

void topology_reads_plain_machines() {
    const Tree laptop({{0, "0-1"}, {1, "0-1"}, {2, "2"}, {3, "3"}}, {}, "0-3");  // unequal cores, no nodes named
    const cpu::Topology all = laptop.read({0, 1, 2, 3});
    expect(all.cores.size() == 3 && all.whole_nodes && all.cores[0].node == 0, "a machine without nodes is one");
    expect(cpu::cpus_of_worker(all, 0, 3) == std::vector<int>({0, 1}), "a core's threads stay together");
    expect(!laptop.read({0, 1, 2}).whole_nodes, "a part of it is not all");
    const cpu::Topology unknown = cpu::read_topology({0, 5, 9}, "/nowhere");
    expect(unknown.cores.size() == 3 && !unknown.whole_nodes, "without a description each processor is a core");
    const Tree broken({{0, "x"}, {1, ""}}, {{0, "0-"}}, "0-1");
    expect(broken.read({0, 1}).cores.size() == 2, "what cannot be read is not believed");
}

void lower_isas_can_be_chosen() {
    cpu::choose_isa("baseline");
    expect(cpu::chosen_isa() == cpu::Isa::baseline, "the baseline can be chosen everywhere");
    expect(refuses([] { cpu::choose_isa("z80"); }), "an instruction set that is not here is refused");
    cpu::choose_isa(cpu::isa_name(cpu::isa()));
    expect(cpu::chosen_isa() == cpu::isa(), "and the best again");
}

}  // namespace

int main() {
    const cpu::Isa isa = cpu::isa();
    kernels_compute(cpu::kCeilingBaseline);
#if defined(__x86_64__)
    if (isa >= cpu::Isa::avx2) kernels_compute(cpu::kCeilingAvx2);
    if (isa == cpu::Isa::avx2_vnni) kernels_compute(cpu::kCeilingAvx2Vnni);
    if (isa >= cpu::Isa::avx512) kernels_compute(cpu::kCeilingAvx512);
    if (isa >= cpu::Isa::avx512_bf16) kernels_compute(cpu::kCeilingAvx512Bf16);
    if (isa >= cpu::Isa::avx512_bf16) kernels_compute(cpu::kCeilingAmx);  // its tiles are of plain C++ here
#endif
    team_keeps_step();
    pool_shares_out();
    items_are_shared_out();
    waiting_threads_read_ahead();
    a_limit_is_the_callers_alone();
    pool_may_shrink_under_a_job();
    pool_does_without_late_workers();
    topology_reads_nodes_and_siblings();
    topology_reads_plain_machines();
    lower_isas_can_be_chosen();
    failures += attention_failures();
    failures += blocks_failures();
    failures += float8_failures();
    failures += linear_failures();
    failures += lora_failures();
    failures += moe_failures();
    failures += quantized_failures();
    failures += quantized_rows_failures();
    failures += suffix_index_failures();
    failures += team_failures();
    failures += whole_attention_failures();
    expect(cpu::read_bandwidth((1 << 20) + 64, 3, 0.01) > 0.0, "bandwidth is positive");
    expect(cpu::fma_peak(2, 0.01) > 0.0, "peak is positive");
    expect(refuses([] { cpu::read_bandwidth(0, 1, 1.0); }), "an empty buffer is refused");
    expect(refuses([] { cpu::fma_peak(0, 1.0); }), "no threads are refused");
    expect(refuses([] { cpu::fma_peak(1, std::numeric_limits<double>::quiet_NaN()); }), "NaN seconds are refused");
    expect(cpu::physical_cores() >= 1, "there is a core");
    expect(cpu::physical_cores() <= static_cast<int>(cpu::allowed_cpus().size()), "a core has a thread");
    std::printf("%s: %d failures\n", cpu::isa_name(isa), failures);
    return failures;
}
