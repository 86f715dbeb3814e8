#include "common/huge_pages.h"

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace quintet {

void wish_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] long bytes) {
#if defined(MADV_HUGEPAGE)
    constexpr uintptr_t kHuge = 2U << 20;
    const uintptr_t first = (reinterpret_cast<uintptr_t>(memory) + kHuge - 1) / kHuge * kHuge;
    const uintptr_t last = (reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes)) / kHuge * kHuge;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // refused: it works without
#endif
}

}  // namespace quintet
