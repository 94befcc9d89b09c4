// Sums, products and extremes of arrays, element by element; and copies.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxmpi {

enum class Type : uint8_t { F32, F64, BF16, F16, S8, S16, S32, S64, U8, U16, U32, U64, C64, C128 };
// By position, as in jaxmpi/_backends/native.py.
enum class Op : uint8_t { Sum, Max, Min, Prod };

// Whether this processor has what the loops are compiled for.
bool can_reduce();

inline int64_t size_of(Type type) {
  switch (type) {
    case Type::S8:
    case Type::U8: return 1;
    case Type::BF16:
    case Type::F16:
    case Type::S16:
    case Type::U16: return 2;
    case Type::F32:
    case Type::S32:
    case Type::U32: return 4;
    case Type::C128: return 16;
    default: return 8;
  }
}

// The type that sums are formed in: F32 for 16-bit floats, the type itself otherwise.
Type wide(Type type);

// total = sources[0] op sources[1] op ..., in this order, of `wide(type)`. The total overlaps no
// source.
void combine(Type type, Op op, const void* const* sources, int count, void* total, int64_t n);

// total = left op right, of `wide(type)`; the total may be one of them.
void combine_wide(Type type, Op op, const void* left, const void* right, void* total, int64_t n);

// out = total / divisor, of `wide(type)`, rounded to `type`. The divisor of integers and complex
// numbers is 1.
void finish(Type type, const void* total, int divisor, void* out, int64_t n);

// Both at once, block by block; each out may be a source, and the second may be null.
void reduce(Type type, Op op, const void* const* sources, int count, int divisor, void* out,
            void* second, int64_t n);

void copy_bytes(void* to, const void* from, int64_t bytes);

// The same past the caches, where the processor can. What others are to see comes after a `fence`.
#if defined(__x86_64__)
constexpr bool kCanStream = true;
#else
constexpr bool kCanStream = false;
#endif
void stream_bytes(void* to, const void* from, int64_t bytes);

inline void fence() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

}  // namespace jaxmpi
