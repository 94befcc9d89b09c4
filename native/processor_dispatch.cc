// The functions of reduce.h and int8.h, by the loops for the processor that this process runs on.

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "int8_loops.h"
#include "reduce_loops.h"

namespace jaxmpi {
namespace {

#if defined(__x86_64__)
// Whether the processor has AVX2 and F16C, and AVX-512 with F, DQ, CD, BW and VL, and the system
// saves their registers. __builtin_cpu_supports is no help: not every compiler's runtime fills in
// its table.
struct Processor {
  bool avx2 = false, avx512 = false;

  Processor() {
    constexpr unsigned kXsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;  // leaf 1, ecx
    constexpr unsigned kAvx2 = 1u << 5,
                       kAvx512 = 1u << 16 | 1u << 17 | 1u << 28 | 3u << 30;  // leaf 7, ebx
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, kXsave | kAvx | kF16c)) return;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    avx2 = has(b, kAvx2) && has(low, 0x6);
    avx512 = avx2 && has(b, kAvx512) && has(low, 0xe6);
  }

  static bool has(unsigned word, unsigned bits) { return (word & bits) == bits; }
};

const Processor processor;
#endif

const Loops& best() {
#if defined(__x86_64__)
  static const Loops& loops = processor.avx512 ? v4::loops : v3::loops;
  return loops;
#else
  return v1::loops;
#endif
}

}  // namespace

bool can_reduce() {
#if defined(__x86_64__)
  return processor.avx2;
#else
  return true;
#endif
}

Type wide(Type type) { return type == Type::BF16 || type == Type::F16 ? Type::F32 : type; }

void combine(Type type, Op op, const void* const* sources, int count, void* total, int64_t n) {
  best().combine(type, op, sources, count, total, n);
}

void combine_wide(Type type, Op op, const void* left, const void* right, void* total, int64_t n) {
  best().combine_wide(wide(type), op, left, right, total, n);
}

void finish(Type type, const void* total, int divisor, void* out, int64_t n) {
  best().finish(type, total, divisor, out, n);
}

void reduce(Type type, Op op, const void* const* sources, int count, int divisor, void* out,
            void* second, int64_t n) {
  best().reduce(type, op, sources, count, divisor, out, second, n);
}

void copy_bytes(void* to, const void* from, int64_t bytes) { best().copy_bytes(to, from, bytes); }

void stream_bytes(void* to, const void* from, int64_t bytes) {
  best().stream_bytes(to, from, bytes);
}

namespace int8 {
namespace {

const Loops& best() {
#if defined(__x86_64__)
  static const Loops& loops = processor.avx512 ? v4::loops : v3::loops;
  return loops;
#else
  return v1::loops;
#endif
}

}  // namespace

void encode(const Part* parts, int64_t count, int64_t skipped, const float* e, int64_t block,
            int64_t blocks, Bytes out, float* residual) {
  best().encode(parts, count, skipped, e, block, blocks, out, residual);
}

void encode_mean(const ConstBytes* rows, int size, const float* e, int64_t block, int64_t blocks,
                 Bytes out, float* residual) {
  best().encode_mean(rows, size, e, block, blocks, out, residual);
}

void decode(ConstBytes row, int64_t block, int64_t first, int64_t count, float* out) {
  best().decode(row, block, first, count, out);
}

}  // namespace int8
}  // namespace jaxmpi
