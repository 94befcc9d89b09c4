#include "gpu_staging.h"

#include <algorithm>

namespace jaxmpi {
namespace {

constexpr int64_t kBatchBytes = 4 << 20;  // of the operands, and as much of the results
constexpr int64_t kAlign = 64;            // bytes

int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

}  // namespace

// Some columns of some arrays, and where they are in pinned memory.
struct Staging::Batch {
  struct Piece {
    const Array* array;
    int64_t column, columns, in, out;  // in, out: offsets in bytes
  };
  std::vector<Piece> pieces;
  int64_t bytes = 0;
};

void Staging::run(Transport& transport, const Operation& operation, int64_t word, const std::vector<Array>& arrays,
                  Cuda::Stream stream, const std::function<void()>& begin) {
  const Kind kind = operation.kind;
  const int64_t size = transport.size();
  const int64_t rows_in = kind == Kind::ReduceScatter || kind == Kind::Alltoall ? size : 1;
  const int64_t rows_out = kind == Kind::Allgather || kind == Kind::Alltoall ? size : 1;
  const bool in_place = kind == Kind::Allreduce;
  std::vector<Batch> batches(1);
  for (const Array& array : arrays) {
    const int64_t item = size_of(array.type), column_bytes = item * (in_place ? 1 : rows_in + rows_out);
    for (int64_t column = 0; column < array.columns;) {
      if (batches.back().bytes + column_bytes > kBatchBytes) batches.emplace_back();
      Batch& batch = batches.back();
      const int64_t room = std::max<int64_t>(1, (kBatchBytes - batch.bytes) / column_bytes);
      const int64_t columns = std::min(array.columns - column, room);
      const int64_t in = batch.bytes, out = in_place ? in : aligned(in + columns * item * rows_in);
      batch.pieces.push_back({&array, column, columns, in, out});
      batch.bytes = aligned(out + columns * item * rows_out);
      column += columns;
    }
  }

  const Cuda::Current current(cuda_, stream);
  const Buffers& buffers = buffers_of(current.context());
  auto memory = [&](size_t k) { return buffers.memory[k % 2]; };
  // Rows of a piece follow each other in pinned memory; on the GPU they are a whole array apart.
  auto to_host = [&](size_t k) {
    for (const auto& [array, column, columns, in, out] : batches[k].pieces) {
      const int64_t item = size_of(array->type);
      for (int64_t row = 0; row < rows_in; ++row) {
        cuda_.copy(memory(k) + in + row * columns * item, array->in + (row * array->columns + column) * item, columns * item,
                   stream);
      }
    }
    cuda_.record(buffers.copied[k % 2], stream);
  };
  auto to_gpu = [&](size_t k) {
    for (const auto& [array, column, columns, in, out] : batches[k].pieces) {
      const int64_t item = size_of(array->type);
      for (int64_t row = 0; row < rows_out; ++row) {
        cuda_.copy(array->out + (row * array->columns + column) * item, memory(k) + out + row * columns * item, columns * item,
                   stream);
      }
    }
  };
  // What a stream is given happens in that order: a batch comes into memory that the one before the last has left.
  try {
    to_host(0);
    for (size_t k = 0; k < batches.size(); ++k) {
      if (k + 1 < batches.size()) to_host(k + 1);
      cuda_.wait(buffers.copied[k % 2]);
      if (k == 0) begin();
      std::vector<Array> staged;
      for (const auto& [array, column, columns, in, out] : batches[k].pieces) {
        staged.push_back({array->type, memory(k) + in, memory(k) + out, columns});
      }
      transport.run(operation, word, std::move(staged));
      to_gpu(k);
    }
  } catch (...) {
    cuda_.finish(stream);
    throw;
  }
  cuda_.finish(stream);  // the next message may come on another stream
}

Staging::Beside Staging::beside(Cuda::Stream stream) {
  const Cuda::Current current(cuda_, stream);
  Buffers& buffers = buffers_of(current.context());
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!buffers.beside) buffers.beside = cuda_.stream();
  if (buffers.ready.empty()) buffers.ready.push_back(cuda_.event());
  const Cuda::Event ready = buffers.ready.back();
  buffers.ready.pop_back();
  cuda_.record(ready, stream);
  return {buffers.beside, ready};
}

void Staging::run_beside(const Beside& beside, Transport& transport, const Operation& operation, int64_t word,
                         const std::vector<Array>& arrays, const std::function<void()>& begin) {
  {
    const Cuda::Current current(cuda_, beside.stream);
    cuda_.hold(beside.stream, beside.ready);
    Buffers& buffers = buffers_of(current.context());
    const std::lock_guard<std::mutex> lock(mutex_);
    buffers.ready.push_back(beside.ready);  // once a stream waits for an event, it may be recorded again
  }
  run(transport, operation, word, arrays, beside.stream, begin);
}

// Those of the context, which is current: made when it is first seen.
Staging::Buffers& Staging::buffers_of(void* context) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Buffers& buffers = buffers_[context];
  for (int i = 0; i < 2; ++i) {
    if (!buffers.memory[i]) buffers.memory[i] = cuda_.pinned(kBatchBytes + 2 * kAlign);
    if (!buffers.copied[i]) buffers.copied[i] = cuda_.event();
  }
  return buffers;
}

}  // namespace jaxmpi
