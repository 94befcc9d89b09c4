#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace jaxmpi {

// Continue a checksum, whose value so far is `total`, with `count` 64-bit words of any alignment;
// jaxmpi/_consistency/values.py defines it. The words are read once, at the speed of memory.
inline uint64_t sum_of_words(const char* words, size_t count, const uint64_t* factors, size_t block,
                             int shift, uint64_t block_factor, uint64_t total) {
  for (size_t start = 0; start < count; start += block) {
    const size_t end = std::min(count - start, block);
    uint64_t sum = 0;
    for (size_t i = 0; i < end; ++i) {
      uint64_t word;
      std::memcpy(&word, words + (start + i) * sizeof word, sizeof word);
      sum += (word ^ (word >> shift)) * factors[i];
    }
    total = total * block_factor + sum;
  }
  return total;
}

}  // namespace jaxmpi
