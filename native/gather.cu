// One launch in place of a copy for each small array. native/gather_ptx.h is what nvcc makes of it (`python packaging/ptx.py`): the build of the
// extension needs no CUDA, and the driver compiles it for the GPU that is there.
#include <cstdint>

struct Piece {
  char* to;
  const char* from;
  int64_t bytes;
};

namespace {

template <class Word>
__device__ int64_t copy(const Piece& piece, int64_t begin) {
  constexpr int kAtOnce = 4;  // loads in flight: the latency over PCIe is high
  auto* __restrict__ to = reinterpret_cast<Word*>(piece.to + begin);
  const auto* __restrict__ from = reinterpret_cast<const Word*>(piece.from + begin);
  const int64_t words = (piece.bytes - begin) / static_cast<int64_t>(sizeof(Word));
  int64_t i = threadIdx.x;
  for (; i + (kAtOnce - 1) * blockDim.x < words; i += kAtOnce * blockDim.x) {
    Word held[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) held[k] = from[i + k * blockDim.x];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) to[i + k * blockDim.x] = held[k];
  }
  for (; i < words; i += blockDim.x) to[i] = from[i];
  return begin + words * static_cast<int64_t>(sizeof(Word));
}

}  // namespace

// A block for each piece. Either side may be pinned memory of the host; so may the table.
extern "C" __global__ void jaxmpi_gather(const Piece* pieces) {
  const Piece piece = pieces[blockIdx.x];
  const auto offsets = reinterpret_cast<uintptr_t>(piece.to) | reinterpret_cast<uintptr_t>(piece.from);
  int64_t done = 0;
  if (offsets % sizeof(uint4) == 0) {
    done = copy<uint4>(piece, 0);
  } else if (offsets % sizeof(uint32_t) == 0) {
    done = copy<uint32_t>(piece, 0);
  } else if (offsets % sizeof(uint16_t) == 0) {
    done = copy<uint16_t>(piece, 0);
  }
  copy<uint8_t>(piece, done);
}
