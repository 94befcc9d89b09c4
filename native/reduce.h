// Sums, products and extremes of arrays, element by element; and copies.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxmpi {

// A value of an enum, and its name in Python. The extension exports the tables of names
// (module.cc), and Python has no other numbers for kinds, operations and dtypes.
template <class Enum>
struct Named {
  const char* name;
  Enum value;
};

enum class Type : uint8_t { F32, F64, BF16, F16, S8, S16, S32, S64, U8, U16, U32, U64, C64, C128 };
constexpr Named<Type> kTypes[] = {
    {"float32", Type::F32},   {"float64", Type::F64},     {"bfloat16", Type::BF16},
    {"float16", Type::F16},   {"int8", Type::S8},         {"int16", Type::S16},
    {"int32", Type::S32},     {"int64", Type::S64},       {"uint8", Type::U8},
    {"uint16", Type::U16},    {"uint32", Type::U32},      {"uint64", Type::U64},
    {"complex64", Type::C64}, {"complex128", Type::C128},
};

enum class Op : uint8_t { Sum, Max, Min, Prod };
constexpr Named<Op> kOps[] = {
    {"sum", Op::Sum}, {"max", Op::Max}, {"min", Op::Min}, {"prod", Op::Prod}};

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

// Return the type that sums are formed in: F32 for 16-bit floats, the type itself otherwise.
Type wide(Type type);

// total = sources[0] op sources[1] op ..., in this order, of `wide(type)`. The total overlaps no
// source.
void combine(Type type, Op op, const void* const* sources, int count, void* total, int64_t n);

// total = left op right, of `wide(type)`; the total may be one of them.
void combine_wide(Type type, Op op, const void* left, const void* right, void* total, int64_t n);

// out = total / divisor, where the total is of `wide(type)`, rounded to `type`. The divisor of
// integers and complex numbers is 1.
void finish(Type type, const void* total, int divisor, void* out, int64_t n);

// `combine` and `finish` at once, block by block, into `out` and into `second`. Each of the two may
// be a source, and `second` may be null.
void reduce(Type type, Op op, const void* const* sources, int count, int divisor, void* out,
            void* second, int64_t n);

void copy_bytes(void* to, const void* from, int64_t bytes);

// `copy_bytes` past the caches, where the processor can. Call `fence` before another core is told
// to read what was written: streaming stores are not ordered with the stores behind them.
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
