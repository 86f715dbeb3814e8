// Memory that is read from end to end, at every step.
#pragma once

namespace quintet {

// Asks for huge pages, with which a product of one row is 3 to 7% faster (Zen 4). To be called before the memory is touched.
void wish_huge_pages(void* memory, long bytes);

}  // namespace quintet
