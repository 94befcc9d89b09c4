#include "reduce.h"

#include "loops.h"

namespace jaxmpi {
namespace {

const Loops& best() {
#if defined(__x86_64__)
  static const Loops& loops = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") ? v4::loops : v3::loops;
  return loops;
#else
  return v1::loops;
#endif
}

}  // namespace

bool can_reduce() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2");  // every processor that has it has F16C
#else
  return true;
#endif
}

int64_t size_of(Type type) {
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

Type wide(Type type) { return type == Type::BF16 || type == Type::F16 ? Type::F32 : type; }

void combine(Type type, Op op, const void* const* sources, int count, void* total, int64_t n) {
  best().combine(type, op, sources, count, total, n);
}

void combine_wide(Type type, Op op, const void* left, const void* right, void* total, int64_t n) {
  best().combine_wide(wide(type), op, left, right, total, n);
}

void finish(Type type, const void* total, int divisor, void* out, int64_t n) { best().finish(type, total, divisor, out, n); }

void reduce(Type type, Op op, const void* const* sources, int count, int divisor, void* out, void* second, int64_t n) {
  best().reduce(type, op, sources, count, divisor, out, second, n);
}

void copy_bytes(void* to, const void* from, int64_t bytes) { best().copy_bytes(to, from, bytes); }

void stream_bytes(void* to, const void* from, int64_t bytes) { best().stream_bytes(to, from, bytes); }

}  // namespace jaxmpi
