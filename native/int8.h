// The arithmetic of jaxmpi.codecs.int8: blocks of 8-bit numbers with a scale each.
//
// A row has k numbers in whole blocks. Encoded, it is k bytes of numbers, and behind them one
// float32 for each block, its scale. Each operation is rounded by itself, as in
// jaxmpi/_optim/int8_blocks.py, so that the bits are the same.
#pragma once

#include <cstdint>

namespace jaxmpi::int8 {

// A part of the numbers that are encoded, which are the arrays one behind the other.
struct Part {
  const float* numbers;
  int64_t count;
};

// Encoded numbers of blocks that are one behind the other.
template <class Byte>
struct Encoded {
  Byte* numbers;
  Byte* scales;  // 4 bytes for each block, not aligned
};
using Bytes = Encoded<char>;
using ConstBytes = Encoded<const char>;

// For blocks of one row, m = g + e; encode m; e' = m - decode(encode(m)). g is what the parts have
// behind the first `skipped` numbers, and zeros are behind it. e' may be e.
void encode(const Part* parts, int64_t count, int64_t skipped, const float* e, int64_t block,
            int64_t blocks, Bytes out, float* residual);

// For blocks of one rank's shard, y = (Σ_r decode(rows[r])) · (1/size) + e; encode y;
// e' = y - decode(encode(y)). e' may be e.
void encode_mean(const ConstBytes* rows, int size, const float* e, int64_t block, int64_t blocks,
                 Bytes out, float* residual);

// out = the numbers `first` to `first + count` of a row.
void decode(ConstBytes row, int64_t block, int64_t first, int64_t count, float* out);

}  // namespace jaxmpi::int8
