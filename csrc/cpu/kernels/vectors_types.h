// The types of vectors_*.h in memory. Not every kernel uses all that attention_types.h defines.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#endif
#include "cpu/kernels/attention_types.h"
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif
