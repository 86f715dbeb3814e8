#include "cpu/ceilings.h"

#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "common/check.h"
#include "common/team.h"
#include "cpu/features.h"

namespace quintet::cpu {

namespace {

constexpr int64_t kMinBytes = int64_t{1} << 20;
constexpr int64_t kMaxBytes = int64_t{1} << 36;  // 64 GiB: sixteen times the largest last-level caches sold
constexpr size_t kLine = 64;                     // bytes in a cache line
constexpr double kRound = 0.005;                 // seconds; far above what starting a round costs
constexpr double kGiga = 1e9;

const CeilingKernels& kernels() {
#if defined(__x86_64__)
    switch (chosen_isa()) {
        case Isa::amx: return kCeilingAmx;
        case Isa::avx512_bf16: return kCeilingAvx512Bf16;
        case Isa::avx512: return kCeilingAvx512;
        case Isa::avx2_vnni: return kCeilingAvx2Vnni;
        case Isa::avx2: return kCeilingAvx2;
        default: break;
    }
#endif
    return kCeilingBaseline;
}

// Pages of its own, not touched yet, so that each lands near the thread that touches it first.
class Pages {
public:
    explicit Pages(size_t bytes)
        : bytes_(bytes), data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
        if (data_ == MAP_FAILED) {
            throw std::runtime_error("no memory for a buffer of " + std::to_string(bytes) + " bytes: " +
                                     std::strerror(errno) + "; ask for fewer");
        }
#if defined(MADV_HUGEPAGE)
        madvise(data_, bytes, MADV_HUGEPAGE);  // a wish: weights are read through huge pages where they are enabled
#endif
    }
    ~Pages() { munmap(data_, bytes_); }
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;

    char* data() const { return static_cast<char*>(data_); }

private:
    size_t bytes_;
    void* data_;
};

}  // namespace

double read_bandwidth(int64_t bytes, int64_t threads, double seconds) {
    check_bytes(bytes, kMinBytes, kMaxBytes);
    check_threads(threads);
    check_seconds(seconds);
    const CeilingKernels& kernel = kernels();
    const size_t members = static_cast<size_t>(threads);
    const size_t lines = static_cast<size_t>(bytes) / kLine;
    const Pages pages(lines * kLine);
    std::atomic<uint64_t> sink{0};  // keeps the reads

    auto first_line = [&](size_t member) { return lines * member / members; };
    auto part = [&](int index) {
        const size_t first = first_line(static_cast<size_t>(index));
        return std::pair{pages.data() + first * kLine, first_line(static_cast<size_t>(index) + 1) - first};
    };
    const double best = shortest_round(
        static_cast<int>(threads), seconds,
        [&](int index) {
            const auto [data, count] = part(index);
            std::memset(data, index + 1, count * kLine);
        },
        [&](int index) {
            const auto [data, count] = part(index);
            sink.fetch_xor(kernel.read(data, count), std::memory_order_relaxed);
        });
    return static_cast<double>(lines * kLine) / best / kGiga;
}

double fma_peak(int64_t threads, double seconds, Numbers numbers) {
    check_threads(threads);
    check_seconds(seconds);
    const MultiplyLoop& loop = kernels().multiply[numbers];
    std::atomic<float> sink{0.0F};  // keeps the arithmetic

    using Clock = std::chrono::steady_clock;
    size_t rounds = 1024;
    for (double took = 0.0; took < kRound; rounds *= 2) {  // ends: each turn takes twice as long as the one before
        const Clock::time_point start = Clock::now();
        sink.store(loop.run(rounds), std::memory_order_relaxed);
        took = std::chrono::duration<double>(Clock::now() - start).count();
    }
    const double best = shortest_round(
        static_cast<int>(threads), seconds, [](int) {},
        [&](int) { sink.store(loop.run(rounds), std::memory_order_relaxed); });
    return 2.0 * static_cast<double>(rounds * loop.adds) * static_cast<double>(threads) / best / kGiga;
}

}  // namespace quintet::cpu
