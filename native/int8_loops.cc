// The arithmetic of codecs.int8, as int8.h declares it, compiled once for each kind of processor,
// in the namespace LEVEL. The compiler makes vectors of the loops, which it may because of the
// pragmas: a result has the memory of an operand or of none. As in reduce_loops.cc, nothing here
// may become a function that the linker shares with another file.

#include "int8_loops.h"

#include <cfloat>
#include <cstring>

namespace jaxmpi::int8::LEVEL {
namespace {

constexpr uint32_t kInfinity = 0x7f800000;
constexpr uint32_t kMagnitude = 0x7fffffff;  // all bits but the sign

// x + kToInteger is x rounded to an integer, half to even, in the low bits, for |x| < 2^22.
constexpr float kToInteger = 12582912;  // 1.5 · 2^23

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float scale_of(ConstBytes row, int64_t block) {
  float scale;
  std::memcpy(&scale, row.scales + block * sizeof scale, sizeof scale);
  return scale;
}

// The larger of two magnitudes, by their bits: so infinity is larger than all numbers, and a NaN
// larger than infinity.
inline uint32_t larger(uint32_t largest, float x) {
  const uint32_t magnitude = bits_of(x) & kMagnitude;
  return magnitude > largest ? magnitude : largest;
}

// m = g + e of n numbers; return the larger of `largest` and their magnitudes.
inline uint32_t add(const float* g, const float* e, float* m, int64_t n, uint32_t largest) {
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) {
    m[i] = g[i] + e[i];
    largest = larger(largest, m[i]);
  }
  return largest;
}

// The same for g = 0: the sum with -0 is 0.
inline uint32_t add_zero(const float* e, float* m, int64_t n, uint32_t largest) {
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) {
    m[i] = 0.0f + e[i];
    largest = larger(largest, m[i]);
  }
  return largest;
}

// Encode a block of n numbers, and leave in their place what the code lacks.
inline void encode_block(float* m, int64_t n, uint32_t largest, char* out, char* scale_out) {
  const float scale = float_of(largest) * static_cast<float>(1.0 / 127);
  std::memcpy(scale_out, &scale, sizeof scale);
  if ((bits_of(scale) & kMagnitude) >= kInfinity) {  // q = 0, whose product with the scale is NaN
    std::memset(out, 0, n);
    for (int64_t i = 0; i < n; ++i) m[i] -= 0 * scale;
    return;
  }
  const float inverse = 1 / (scale < FLT_MIN ? 1 : scale);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float shifted = m[i] * inverse + kToInteger;
    out[i] = static_cast<char>(bits_of(shifted));
    m[i] -= (shifted - kToInteger) * scale;
  }
}

// y = q·s, or y + q·s, for a block of n numbers.
template <bool first>
inline void add_decoded(const char* q, float scale, float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float number = static_cast<float>(static_cast<signed char>(q[i]));
    y[i] = first ? number * scale : y[i] + number * scale;
  }
}

void encode(const Part* parts, int64_t count, int64_t skipped, const float* e, int64_t block,
            int64_t blocks, Bytes out, float* residual) {
  Part part{nullptr, 0};
  int64_t next = 0;
  const auto advance = [&] {
    while (part.count == 0 && next < count) {
      part = parts[next++];
      const int64_t n = part.count < skipped ? part.count : skipped;
      part = {part.numbers + n, part.count - n};
      skipped -= n;
    }
    return part.count > 0;
  };
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t begin = i * block, end = begin + block;
    uint32_t largest = 0;
    // a block may have numbers of several parts
    for (int64_t done = begin; done < end;) {
      if (!advance()) {
        largest = add_zero(e + done, residual + done, end - done, largest);
        break;
      }
      const int64_t n = part.count < end - done ? part.count : end - done;
      largest = add(part.numbers, e + done, residual + done, n, largest);
      part = {part.numbers + n, part.count - n};
      done += n;
    }
    encode_block(residual + begin, block, largest, out.numbers + begin,
                 out.scales + i * sizeof(float));
  }
}

void encode_mean(const ConstBytes* rows, int size, const float* e, int64_t block, int64_t blocks,
                 Bytes out, float* residual) {
  const float inverse = static_cast<float>(1.0 / size);
  constexpr int64_t kPiece = 1024;  // numbers: a piece of the sums stays in the L1 cache
  float sums[kPiece];
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t begin = i * block, end = begin + block;
    uint32_t largest = 0;
    for (int64_t done = begin; done < end; done += kPiece) {
      const int64_t n = end - done < kPiece ? end - done : kPiece;
      add_decoded<true>(rows[0].numbers + done, scale_of(rows[0], i), sums, n);
      for (int r = 1; r < size; ++r)
        add_decoded<false>(rows[r].numbers + done, scale_of(rows[r], i), sums, n);
#pragma omp simd reduction(max : largest)
      for (int64_t j = 0; j < n; ++j) {
        const float y = sums[j] * inverse + e[done + j];
        residual[done + j] = y;
        largest = larger(largest, y);
      }
    }
    encode_block(residual + begin, block, largest, out.numbers + begin,
                 out.scales + i * sizeof(float));
  }
}

void decode(ConstBytes row, int64_t block, int64_t first, int64_t count, float* out) {
  for (int64_t done = 0; done < count;) {
    const int64_t i = (first + done) / block, left = (i + 1) * block - (first + done);
    const int64_t n = left < count - done ? left : count - done;
    add_decoded<true>(row.numbers + first + done, scale_of(row, i), out + done, n);
    done += n;
  }
}

}  // namespace

const Loops loops = {encode, encode_mean, decode};

}  // namespace jaxmpi::int8::LEVEL
