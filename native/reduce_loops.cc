// The arithmetic of reductions (sum, divide, round to 16 bits), as reduce.h declares it, compiled
// once for each kind of processor, in the namespace LEVEL. Nothing here may become a function that
// the linker shares with another file: it might keep the copy compiled for a processor that this
// one is not.

#include "reduce_loops.h"

#include <algorithm>
#include <complex>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace jaxmpi::LEVEL {
namespace {

constexpr int64_t kBlock = 1024;  // elements: a block of totals stays in the L1 cache

// 16-bit floats, by their bits

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

template <class To, class From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline float widen(BF16 x) { return bit_cast<float>(uint32_t{x.bits} << 16); }

// Round to nearest, ties to even. A NaN stays a NaN, because the lower half of its bits is 0: it
// comes from a BF16, or the processor made it.
inline BF16 to_bf16(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

template <class T>
void widen_all(const T* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = widen(in[i]);
}

void narrow_all(const float* in, BF16* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = to_bf16(in[i]);
}

#if defined(__F16C__)
inline float widen(F16 x) { return _cvtsh_ss(x.bits); }

template <>
void widen_all(const F16* in, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(out + i,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  }
  for (; i < n; ++i) out[i] = widen(in[i]);
}

void narrow_all(const float* in, F16* out, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i rounded = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), rounded);
  }
  for (; i < n; ++i) out[i] = {static_cast<uint16_t>(_cvtss_sh(in[i], _MM_FROUND_TO_NEAREST_INT))};
}
#else
inline float widen(F16 x) { return static_cast<float>(bit_cast<_Float16>(x.bits)); }

void narrow_all(const float* in, F16* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = {bit_cast<uint16_t>(static_cast<_Float16>(in[i]))};
}
#endif

#if defined(__AVX2__)
// Copy whole cache lines, 64 bytes each, from byte i on; return where the rest begins.
template <class Store>
int64_t copy_lines(char* out, const char* in, int64_t i, int64_t bytes, Store store) {
  for (; i + 64 <= bytes; i += 64) {
    const __m256i* line = reinterpret_cast<const __m256i*>(in + i);
    const __m256i left = _mm256_loadu_si256(line), right = _mm256_loadu_si256(line + 1);
    store(reinterpret_cast<__m256i*>(out + i), left);
    store(reinterpret_cast<__m256i*>(out + i + 32), right);
  }
  return i;
}
#endif

// Copy without memcpy: that of glibc 2.36 is an instruction that takes up to 27 times as long on
// AMD's Zen 3 where `to` is a few bytes after `from`, modulo 4096.
void copy_bytes(void* to, const void* from, int64_t bytes) {
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  int64_t i = 0;
#if defined(__AVX2__)
  i = copy_lines(out, in, i, bytes,
                 [](__m256i* place, __m256i half) { _mm256_storeu_si256(place, half); });
#endif
  if (i < bytes) std::memcpy(out + i, in + i, bytes - i);
}

// Copy past the caches. Only whole cache lines are streamed: each part of a line would go to memory
// on its own.
void stream_bytes(void* to, const void* from, int64_t bytes) {
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  int64_t i = 0;
#if defined(__AVX2__)
  i = std::min<int64_t>(bytes, -reinterpret_cast<uintptr_t>(out) % 64);
  copy_bytes(out, in, i);
  i = copy_lines(out, in, i, bytes,
                 [](__m256i* place, __m256i half) { _mm256_stream_si256(place, half); });
#endif
  copy_bytes(out + i, in + i, bytes - i);
}

template <class T>
constexpr bool is_short = std::is_same_v<T, BF16> || std::is_same_v<T, F16>;

template <class T>
using Wide = std::conditional_t<is_short<T>, float, T>;

template <class T>
struct is_complex : std::false_type {};
template <class T>
struct is_complex<std::complex<T>> : std::true_type {};

// operations; integers wrap around, and a NaN is larger and smaller than all else

template <class T>
T wrapping(T a, T b, bool product) {
  using U = std::conditional_t<(sizeof(T) < 4), uint32_t, std::make_unsigned_t<T>>;
  const U x = static_cast<U>(a), y = static_cast<U>(b);
  return static_cast<T>(product ? x * y : x + y);
}

// Of -0 and +0 it returns the same one in any order.
template <class T>
T of_equals(T a, T b, bool negative) {
  if constexpr (std::is_floating_point_v<T>) {
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    const Bits x = bit_cast<Bits>(a), y = bit_cast<Bits>(b);
    return bit_cast<T>(negative ? x | y : x & y);
  } else {
    return a;
  }
}

template <Op op, class T>
T apply(T a, T b) {
  if constexpr (op == Op::Sum) {
    if constexpr (std::is_integral_v<T>)
      return wrapping(a, b, false);
    else
      return a + b;
  } else if constexpr (op == Op::Prod) {
    if constexpr (std::is_integral_v<T>)
      return wrapping(a, b, true);
    else if constexpr (is_complex<T>::value) {
      return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
    } else
      return a * b;
  } else if constexpr (is_complex<T>::value) {
    return a;  // complex numbers have no order; the layers above refuse them
  } else if constexpr (op == Op::Max) {
    return a > b || a != a ? a : a == b ? of_equals(a, b, false) : b;
  } else {
    return a < b || a != a ? a : a == b ? of_equals(a, b, true) : b;
  }
}

// From here on, types and operations are chosen at run time.

template <class F>
auto with_type(Type type, F f) {
  switch (type) {
    case Type::F32: return f(float{});
    case Type::F64: return f(double{});
    case Type::BF16: return f(BF16{});
    case Type::F16: return f(F16{});
    case Type::S8: return f(int8_t{});
    case Type::S16: return f(int16_t{});
    case Type::S32: return f(int32_t{});
    case Type::S64: return f(int64_t{});
    case Type::U8: return f(uint8_t{});
    case Type::U16: return f(uint16_t{});
    case Type::U32: return f(uint32_t{});
    case Type::U64: return f(uint64_t{});
    case Type::C64: return f(std::complex<float>{});
    case Type::C128: break;
  }
  return f(std::complex<double>{});
}

template <class F>
void with_op(Op op, F f) {
  switch (op) {
    case Op::Sum: return f(std::integral_constant<Op, Op::Sum>{});
    case Op::Max: return f(std::integral_constant<Op, Op::Max>{});
    case Op::Min: return f(std::integral_constant<Op, Op::Min>{});
    case Op::Prod: return f(std::integral_constant<Op, Op::Prod>{});
  }
}

template <Op op, class T>
void add_on(const T* source, Wide<T>* __restrict total, int64_t n) {
  if constexpr (is_short<T>) {
    float widened[kBlock];
    widen_all(source, widened, n);
    for (int64_t i = 0; i < n; ++i) total[i] = apply<op>(total[i], widened[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) total[i] = apply<op>(total[i], source[i]);
  }
}

// Reduce at most kBlock elements.
template <Op op, class T>
void combine_block(const void* const* sources, int count, int64_t start, Wide<T>* __restrict total,
                   int64_t n) {
  auto source = [&](int i) { return static_cast<const T*>(sources[i]) + start; };
  int done = 1;
  if constexpr (is_short<T>) {
    widen_all(source(0), total, n);
  } else if (count == 1) {
    copy_bytes(total, source(0), n * sizeof(T));
  } else {
    const T *a = source(0), *b = source(1);
    for (int64_t i = 0; i < n; ++i) total[i] = apply<op>(a[i], b[i]);
    done = 2;
  }
  for (; done < count; ++done) add_on<op, T>(source(done), total, n);
}

template <class T>
void divide_block(T* total, int divisor, int64_t n) {
  if constexpr (std::is_floating_point_v<T>) {
    const T by = static_cast<T>(divisor), inverse = 1 / by;
    if (divisor == 1) return;
    if ((divisor & (divisor - 1)) == 0) {  // exact
      for (int64_t i = 0; i < n; ++i) total[i] *= inverse;
    } else {
      for (int64_t i = 0; i < n; ++i) total[i] /= by;
    }
  }
}

template <class T>
void narrow_block(const Wide<T>* total, T* out, int64_t n) {
  if constexpr (is_short<T>)
    narrow_all(total, out, n);
  else
    copy_bytes(out, total, n * sizeof(T));
}

template <class F>
void in_blocks(int64_t begin, int64_t end, F f) {
  for (int64_t start = begin; start < end; start += kBlock) f(start, std::min(kBlock, end - start));
}

// Reduce the first numbers, where there is a faster way; return how many.
template <Op op, class T>
int64_t reduce_first(const void* const*, int, int, T*, T*, int64_t) {
  return 0;
}

// Vectors of the compiler, as wide as the processor that this file is compiled for has them; every
// processor has 16 bytes.
#if defined(__AVX512BW__)
constexpr int64_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int64_t kVectorBytes = 32;
#else
constexpr int64_t kVectorBytes = 16;
#endif
using Floats = float __attribute__((vector_size(kVectorBytes)));
using Words = uint32_t __attribute__((vector_size(kVectorBytes)));
constexpr int64_t kLanes = kVectorBytes / sizeof(float);

// Two vectors of numbers as floats, in an order that is the same for each source and for the
// result.
struct Pair {
  static constexpr int64_t kNumbers = 2 * kLanes;
  Floats x, y;
};

template <class Vector>
Vector load(const void* in) {
  Vector vector;
  std::memcpy(&vector, in, sizeof vector);
  return vector;
}

inline Pair load_pair(const float* in) { return {load<Floats>(in), load<Floats>(in + kLanes)}; }

inline void store_pair(float* out, const Pair& pair) {
  std::memcpy(out, &pair.x, sizeof pair.x);
  std::memcpy(out + kLanes, &pair.y, sizeof pair.y);
}

// Of two neighbors, the one in the lower half of a 32-bit word is in x, and the other in y.
inline Pair load_pair(const BF16* in) {
  const Words words = load<Words>(in);
  return {bit_cast<Floats>(words << 16), bit_cast<Floats>(words & 0xffff0000)};
}

// Round as to_bf16 does, into the upper halves.
inline Words rounded(Floats x) {
  const Words bits = bit_cast<Words>(x);
  return bits + 0x7fff + ((bits >> 16) & 1);
}

inline void store_pair(BF16* out, const Pair& pair) {
  const Words words = (rounded(pair.x) >> 16) | (rounded(pair.y) & 0xffff0000);
  std::memcpy(out, &words, sizeof words);
}

// A sum stays in the registers from the ranks' arrays to the rounded mean.
template <class T>
int64_t sum_first(const void* const* sources, int count, int divisor, T* out, T* second,
                  int64_t n) {
  const bool exact = (divisor & (divisor - 1)) == 0;
  const float by = static_cast<float>(divisor), inverse = 1 / by;
  int64_t i = 0;
  for (; i + Pair::kNumbers <= n; i += Pair::kNumbers) {
    auto source = [&](int k) { return load_pair(static_cast<const T*>(sources[k]) + i); };
    Pair sum = source(0);
    for (int k = 1; k < count; ++k) {
      const Pair more = source(k);
      sum = {sum.x + more.x, sum.y + more.y};
    }
    sum = exact ? Pair{sum.x * inverse, sum.y * inverse} : Pair{sum.x / by, sum.y / by};
    store_pair(out + i, sum);
    if (second) store_pair(second + i, sum);
  }
  return i;
}

template <>
int64_t reduce_first<Op::Sum>(const void* const* sources, int count, int divisor, float* out,
                              float* second, int64_t n) {
  return sum_first(sources, count, divisor, out, second, n);
}

template <>
int64_t reduce_first<Op::Sum>(const void* const* sources, int count, int divisor, BF16* out,
                              BF16* second, int64_t n) {
  return sum_first(sources, count, divisor, out, second, n);
}

void combine(Type type, Op op, const void* const* sources, int count, void* total, int64_t n) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    with_op(op, [&](auto o) {
      in_blocks(0, n, [&](int64_t start, int64_t m) {
        combine_block<o(), T>(sources, count, start, static_cast<Wide<T>*>(total) + start, m);
      });
    });
  });
}

void combine_wide(Type type, Op op, const void* left, const void* right, void* total, int64_t n) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    with_op(op, [&](auto o) {
      if constexpr (!is_short<T>) {
        const T *a = static_cast<const T*>(left), *b = static_cast<const T*>(right);
        T* out = static_cast<T*>(total);
        for (int64_t i = 0; i < n; ++i) out[i] = apply<o()>(a[i], b[i]);
      }
    });
  });
}

void finish(Type type, const void* total, int divisor, void* out, int64_t n) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    in_blocks(0, n, [&](int64_t start, int64_t m) {
      Wide<T> block[kBlock];
      copy_bytes(block, static_cast<const Wide<T>*>(total) + start, m * sizeof(Wide<T>));
      divide_block(block, divisor, m);
      narrow_block<T>(block, static_cast<T*>(out) + start, m);
    });
  });
}

void reduce(Type type, Op op, const void* const* sources, int count, int divisor, void* out,
            void* second, int64_t n) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    with_op(op, [&](auto o) {
      const int64_t done = reduce_first<o()>(sources, count, divisor, static_cast<T*>(out),
                                             static_cast<T*>(second), n);
      in_blocks(done, n, [&](int64_t start, int64_t m) {
        Wide<T> block[kBlock];
        combine_block<o(), T>(sources, count, start, block, m);
        divide_block(block, divisor, m);
        narrow_block<T>(block, static_cast<T*>(out) + start, m);
        if (second)
          copy_bytes(static_cast<T*>(second) + start, static_cast<T*>(out) + start, m * sizeof(T));
      });
    });
  });
}

}  // namespace

const Loops loops = {combine, combine_wide, finish, reduce, copy_bytes, stream_bytes};

}  // namespace jaxmpi::LEVEL
