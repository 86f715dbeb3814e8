// The types that numbers have in memory, as bindings and kernels' tables number them.
#pragma once

namespace quintet::cpu {

enum class FloatType { float32, bfloat16, float16 };
constexpr int kFloatTypes = 3;
constexpr long size_of(FloatType type) { return type == FloatType::float32 ? 4 : 2; }

// One kernel for each type.
template <typename Kernel>
struct OfTypes {
    Kernel of[kFloatTypes];
    constexpr Kernel operator[](FloatType type) const { return of[static_cast<int>(type)]; }
};

}  // namespace quintet::cpu
