// What ranks compute together and tell each other, as threads with a mapping of the shared memory each, as processes have it.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "cpu/comm/collectives.h"
#include "cpu/team.h"
#include "tests/isas.h"
#include "tests/numbers.h"

namespace {

namespace cpu = quintet::cpu;

int failures = 0;

void expect(bool holds, const char* claim, int size) {
    if (holds) return;
    ++failures;
    std::printf("team of %d: not so: %s\n", size, claim);
}

// Each rank's work in a thread of its own; whether it went well is looked at when all are through.
void on_ranks(int size, const char* claim, const std::function<bool(cpu::Team&)>& work) {
    const int file = memfd_create("team_test", 0);
    std::vector<char> good(static_cast<size_t>(size), 0);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
        threads.emplace_back([&, rank] {
            cpu::Team team(file, rank, size, 60.0, size);
            good[static_cast<size_t>(rank)] = work(team);
        });
    }
    for (std::thread& each : threads) each.join();
    close(file);
    for (const char each : good) expect(each != 0, claim, size);
}

bool sums(cpu::Team& team, long count) {
    std::vector<float> x(static_cast<size_t>(count)), out(x.size());
    for (long i = 0; i < count; ++i) x[static_cast<size_t>(i)] = static_cast<float>(whole(i + team.rank()));
    cpu::all_reduce({&team, out.data(), x.data(), count, cpu::FloatType::float32});
    bool good = true;
    for (long i = 0; i < count; ++i) {
        long total = 0;
        for (int rank = 0; rank < team.size(); ++rank) total += whole(i + rank);
        good = good && out[static_cast<size_t>(i)] == static_cast<float>(total);
    }
    return good;
}

bool joins(cpu::Team& team, long outer, long bytes) {
    std::vector<uint8_t> x(static_cast<size_t>(outer * bytes)), out(x.size() * static_cast<size_t>(team.size()));
    const auto value = [bytes](int rank, long row, long i) { return static_cast<uint8_t>(rank * 7 + row * bytes + i); };
    for (long row = 0; row < outer; ++row) {
        for (long i = 0; i < bytes; ++i) x[static_cast<size_t>(row * bytes + i)] = value(team.rank(), row, i);
    }
    cpu::all_gather({&team, out.data(), x.data(), outer, bytes});
    bool good = true;
    for (long at = 0; at < static_cast<long>(out.size()); ++at) {
        const long row = at / (bytes * team.size()), rank = at / bytes % team.size();
        good = good && out[static_cast<size_t>(at)] == value(static_cast<int>(rank), row, at % bytes);
    }
    return good;
}

bool spreads(cpu::Team& team, long bytes, int root) {
    std::vector<uint8_t> x(static_cast<size_t>(bytes), static_cast<uint8_t>(team.rank()));
    cpu::broadcast({&team, x.data(), bytes, root});
    for (const uint8_t each : x) {
        if (each != root) return false;
    }
    return true;
}

bool talks(cpu::Team& team) {
    for (int turn = 0; turn < 50; ++turn) {
        const std::string letter(static_cast<size_t>(turn) * 3001, static_cast<char>('a' + turn % 20));
        if (team.rank() == 0) team.tell(letter);
        if (team.rank() != 0 && team.hear() != letter) return false;
        const std::vector<std::string> notes = team.exchange(std::to_string(turn * 100 + team.rank()));
        for (int rank = 0; rank < team.size(); ++rank) {
            if (notes[static_cast<size_t>(rank)] != std::to_string(turn * 100 + rank)) return false;
        }
    }
    return true;
}

// The last rank leaves a step in which the others are, and all meet at its end; then it ends, and nobody waits for it.
bool parts(cpu::Team& team) {
    team.exchange("");
    team.exchange("");
    const bool leaves = team.rank() == team.size() - 1;
    bool left = leaves;
    try {
        if (!leaves) sums(team, 10);
    } catch (const cpu::StepLeft&) {
        left = true;
    }
    team.exchange("");
    if (leaves) team.stop("the last has ended");
    try {
        while (true) team.exchange("");
    } catch (const cpu::RankLost& lost) {
        return left && std::string(lost.what()).find("the last has ended") != std::string::npos;
    }
}

// Whether that thread of this process sleeps.
bool sleeps(pid_t thread) {
    std::ifstream stat("/proc/self/task/" + std::to_string(thread) + "/stat");
    std::string line;
    std::getline(stat, line);
    const size_t name_end = line.rfind(')');
    return name_end != std::string::npos && line.compare(name_end, 3, ") S") == 0;
}

// Rank 1 brings its note when rank 0 sleeps, and ends at once: rank 0 gets that note, and only then hears of the end.
void ends_behind_its_note() {
    std::atomic<pid_t> waiting{0};
    on_ranks(2, "a note counts, though its rank has ended since", [&waiting](cpu::Team& team) {
        team.exchange("");
        if (team.rank() == 0) {
            waiting = static_cast<pid_t>(syscall(SYS_gettid));
        } else {
            while (waiting == 0 || !sleeps(waiting)) std::this_thread::yield();
        }
        try {
            team.exchange("");
        } catch (const cpu::RankLost&) {
            return false;
        }
        if (team.rank() == 1) team.stop("rank 1 has ended");
        return true;
    });
}

}  // namespace

int team_failures() {
    with_each_isa([] {
        for (const int size : {2, 3, 5}) {
            for (const long count : {1L, 7L, 1000L, 65536L, 100001L}) {  // one place holds 65536
                on_ranks(size, "sums are of all parts", [count](cpu::Team& team) { return sums(team, count); });
            }
        }
    });
    for (const int size : {2, 3, 5}) {
        on_ranks(size, "parts are joined in rank order", [](cpu::Team& team) {
            return joins(team, 1, 1) && joins(team, 3, 5) && joins(team, 2, 300001);
        });
        on_ranks(size, "the root's is everybody's", [](cpu::Team& team) {
            return spreads(team, 1, 0) && spreads(team, 300001, 1);
        });
        on_ranks(size, "letters and notes arrive whole and in order", talks);
        on_ranks(size, "who leaves a step is not waited for, nor who ends", parts);
    }
    for (int turn = 0; turn < 20; ++turn) ends_behind_its_note();
    return failures;
}
