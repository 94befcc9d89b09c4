// Prints a digest of what the loops of one LEVEL make of the same numbers: equal on every processor (test_loops.py).

#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "int8_loops.h"
#include "reduce_loops.h"

namespace {

using namespace jaxmpi;

constexpr int kBytes[] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8, 8, 16};  // of each `Type`

int64_t bytes_of(Type type) { return kBytes[static_cast<int>(type)]; }

int64_t total_bytes_of(Type type) { return type == Type::BF16 || type == Type::F16 ? 4 : bytes_of(type); }

constexpr int64_t kNumbers = 2 * 1024 + 37;  // two blocks, and some that fill no vector
constexpr int kSources = 5;

uint32_t next(uint32_t& state) { return state = state * 1664525u + 1013904223u; }

// Numbers of any size and sign, zeros of both signs and denormals among them, but neither infinite nor NaN: which NaN comes out
// is up to the processor.
template <class T>
void fill(std::vector<char>& bytes, uint32_t state) {
  T* numbers = reinterpret_cast<T*>(bytes.data());
  for (size_t i = 0; i < bytes.size() / sizeof(T); ++i) {
    const int32_t digits = next(state);
    const double value = std::ldexp(digits, static_cast<int>(next(state) >> 28) - 40);
    numbers[i] = i % 11 == 0 ? T(0) * T(value) : static_cast<T>(value);
  }
}

uint16_t half(float value, Type type) {  // cut off
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (type == Type::BF16) return bits >> 16;
  const int exponent = static_cast<int>(bits >> 23 & 0xff) - 112;
  const uint16_t sign = bits >> 16 & 0x8000;
  return exponent <= 0 ? sign | (bits >> 13 & 0x3ff) : sign | (exponent > 29 ? 29 : exponent) << 10 | (bits >> 13 & 0x3ff);
}

std::vector<char> numbers_of(Type type, uint32_t seed) {
  std::vector<char> bytes(kNumbers * bytes_of(type));
  const Type part = type == Type::C64 ? Type::F32 : type == Type::C128 ? Type::F64 : type;
  if (part == Type::F64) {
    fill<double>(bytes, seed);
  } else if (part == Type::F32) {
    fill<float>(bytes, seed);
  } else if (part == Type::BF16 || part == Type::F16) {
    std::vector<char> wide(kNumbers * 4);
    fill<float>(wide, seed);
    for (int64_t i = 0; i < kNumbers; ++i) {
      float value;
      std::memcpy(&value, wide.data() + 4 * i, 4);
      const uint16_t bits = half(value, part);
      std::memcpy(bytes.data() + 2 * i, &bits, 2);
    }
  } else {
    for (char& byte : bytes) byte = static_cast<char>(next(seed) >> 24);
  }
  return bytes;
}

uint64_t digest(const std::vector<char>& bytes) {
  uint64_t hash = 14695981039346656037u;
  for (char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 1099511628211u;
  return hash;
}

// Print digests of what codecs.int8 makes of numbers in blocks: of a vector's length, longer, shorter.
void print_int8() {
  const int8::Loops& loops = int8::LEVEL::loops;
  std::vector<std::vector<char>> arrays;
  for (int i = 0; i < kSources; ++i) arrays.push_back(numbers_of(Type::F32, 7700 + i));
  const auto floats = [&](int i) { return reinterpret_cast<float*>(arrays[i].data()); };
  for (int64_t block : {1, 16, 37, 1000}) {
    const int64_t blocks = kNumbers / block, k = blocks * block;
    std::vector<std::vector<char>> codes(kSources, std::vector<char>(k + 4 * blocks));
    std::vector<int8::ConstBytes> rows;
    std::vector<char> residual(4 * k), out(4 * k), answer(k + 4 * blocks);
    float* kept = reinterpret_cast<float*>(residual.data());
    for (int i = 0; i < kSources; ++i) {
      // two arrays, of which the first begins before these numbers, and zeros behind them
      const int8::Part parts[] = {{floats(i), 70}, {floats(i) + 70, 1000}};
      std::memcpy(residual.data(), arrays[(i + 1) % kSources].data(), residual.size());
      loops.encode(parts, 2, 5, kept, block, blocks, {codes[i].data(), codes[i].data() + k}, kept);
      rows.push_back({codes[i].data(), codes[i].data() + k});
      std::printf("int8 %d %d %016" PRIx64 "\n", static_cast<int>(block), i, digest(codes[i]) ^ digest(residual));
    }
    loops.encode_mean(rows.data(), kSources, kept, block, blocks, {answer.data(), answer.data() + k}, kept);
    std::printf("int8 %d mean %016" PRIx64 "\n", static_cast<int>(block), digest(answer) ^ digest(residual));
    loops.decode(rows[0], block, 3, k - 5, reinterpret_cast<float*>(out.data()));
    std::printf("int8 %d decoded %016" PRIx64 "\n", static_cast<int>(block), digest(out));
  }
}

}  // namespace

int main() {
  print_int8();
  const Loops& loops = jaxmpi::LEVEL::loops;
  for (int t = 0; t <= static_cast<int>(Type::C128); ++t) {
    const Type type = static_cast<Type>(t);
    std::vector<std::vector<char>> arrays;
    std::vector<const void*> sources;
    for (int i = 0; i < kSources; ++i) arrays.push_back(numbers_of(type, 77 * t + i));
    for (const auto& array : arrays) sources.push_back(array.data());
    for (int o = 0; o < (type >= Type::C64 ? 1 : 4); ++o) {
      const Op op = static_cast<Op>(o);
      for (int count = 1; count <= kSources; ++count) {
        const bool averages = op == Op::Sum && type <= Type::F16;
        const std::vector<char> empty(kNumbers * bytes_of(type));
        std::vector<char> total(kNumbers * total_bytes_of(type)), out = empty, both = empty, second = empty;
        loops.combine(type, op, sources.data(), count, total.data(), kNumbers);
        loops.finish(type, total.data(), averages ? count : 1, out.data(), kNumbers);
        loops.reduce(type, op, sources.data(), count, averages ? count : 1, both.data(), second.data(), kNumbers);
        if (out != both || both != second) return 1;
        std::printf("%d %d %d %016" PRIx64 "\n", t, o, count, digest(out));
      }
    }
    std::vector<char> copy(arrays[0].size());
    loops.stream_bytes(copy.data() + 1, arrays[0].data(), static_cast<int64_t>(copy.size()) - 1);
    if (std::memcmp(copy.data() + 1, arrays[0].data(), copy.size() - 1)) return 2;
  }
}
