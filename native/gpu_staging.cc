#include "gpu_staging.h"

#include <algorithm>

#include "clock.h"

namespace jaxmpi {
namespace {

constexpr int64_t kAlign = 64;  // bytes
// From so many bytes on, a copy of its own is faster than a block of the kernel.
constexpr int64_t kLargePiece = 64 << 10;
constexpr int64_t kMostPieces = 4096;  // of a batch, each way
constexpr int64_t kFewPieces = 2;      // up to so many, separate copies are faster than a launch
constexpr size_t kAhead = 2;           // batches on their way to the host

int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

}  // namespace

// Some columns of some arrays, in memory of the host. There the rows of a part follow each other;
// on the GPU they are a whole array apart.
struct Staging::Batch {
  struct Part {
    const Array* array;
    int64_t column, columns, in, out;  // in, out: offsets in bytes
  };
  std::vector<Part> parts;
  int64_t rows_in, rows_out;
  int64_t bytes = 0;

  std::vector<Array> staged(char* memory) const {
    std::vector<Array> arrays;
    for (const Part& part : parts)
      arrays.push_back({part.array->type, memory + part.in, memory + part.out, part.columns});
    return arrays;
  }

  std::vector<Cuda::Piece> down(char* memory) const {
    std::vector<Cuda::Piece> pieces;
    for (const Part& part : parts) {
      const Array& array = *part.array;
      const int64_t item = size_of(array.type), bytes = part.columns * item;
      for (int64_t row = 0; row < rows_in; ++row) {
        pieces.push_back({memory + part.in + row * bytes,
                          array.in + (row * array.columns + part.column) * item, bytes});
      }
    }
    return pieces;
  }

  std::vector<Cuda::Piece> up(const char* memory) const {
    std::vector<Cuda::Piece> pieces;
    for (const Part& part : parts) {
      const Array& array = *part.array;
      const int64_t item = size_of(array.type), bytes = part.columns * item;
      for (int64_t row = 0; row < rows_out; ++row) {
        pieces.push_back({array.out + (row * array.columns + part.column) * item,
                          memory + part.out + row * bytes, bytes});
      }
    }
    return pieces;
  }
};

std::vector<Staging::Batch> Staging::batches_of(const Operation& operation, int ranks,
                                                const std::vector<Array>& arrays) const {
  const Kind kind = operation.kind;
  const int64_t rows_in = kind == Kind::ReduceScatter || kind == Kind::Alltoall ? ranks : 1;
  const int64_t rows_out = kind == Kind::Allgather || kind == Kind::Alltoall ? ranks : 1;
  const bool in_place = kind == Kind::Allreduce;
  const auto most_parts =
      static_cast<size_t>(std::max<int64_t>(1, kMostPieces / std::max(rows_in, rows_out)));
  std::vector<Batch> batches(1, {{}, rows_in, rows_out});
  for (const Array& array : arrays) {
    const int64_t item = size_of(array.type),
                  column_bytes = item * (in_place ? 1 : rows_in + rows_out);
    // A cut at a multiple of so many columns leaves both sides aligned.
    const int64_t line = std::max<int64_t>(1, kAlign / item);
    for (int64_t column = 0; column < array.columns;) {
      int64_t room = (batch_bytes_ - batches.back().bytes) / column_bytes;
      if (room >= line) room = room / line * line;
      if (!batches.back().parts.empty() &&
          (room < 1 || batches.back().parts.size() == most_parts)) {
        batches.push_back({{}, rows_in, rows_out});
        continue;
      }
      Batch& batch = batches.back();
      const int64_t columns = std::min(array.columns - column, std::max<int64_t>(1, room));
      const int64_t in = batch.bytes, out = in_place ? in : aligned(in + columns * item * rows_in);
      batch.parts.push_back({&array, column, columns, in, out});
      batch.bytes = aligned(out + columns * item * rows_out);
      column += columns;
    }
  }
  return batches;
}

void Staging::run(const Operation& operation, int ranks, const std::vector<Array>& arrays,
                  Cuda::Stream stream, const std::function<void()>& begin, const Carry& carry) {
  const Ready at = ready(stream);
  const Cuda::Current current(cuda_, at->context);
  stage(*at, operation, ranks, arrays, begin, carry);
  cuda_.hold(stream, at->event);
}

void Staging::run_overlapped(const Ready& ready, const Operation& operation, int ranks,
                             const std::vector<Array>& arrays, const std::function<void()>& begin,
                             const Carry& carry) {
  const Cuda::Current current(cuda_, ready->context);
  stage(*ready, operation, ranks, arrays, begin, carry);
  cuda_.wait(ready->event);
}

// A wait refers to the record that was current when it was issued, so the event can be recorded
// again.
Staging::Ready Staging::ready(Cuda::Stream stream) {
  void* const handle = cuda_.context_of(stream);
  const Cuda::Current current(cuda_, handle);
  Context& context = context_of(handle);
  Cuda::Event event = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!context.unused.empty()) {
      event = context.unused.back();
      context.unused.pop_back();
    }
  }
  if (!event) event = cuda_.event();
  const Ready ready(new Point{handle, event}, [this, &context](const Point* point) {
    const std::lock_guard<std::mutex> lock(mutex_);
    context.unused.push_back(point->event);
    delete point;
  });
  cuda_.record(event, stream);
  return ready;
}

// Stage the batches of a collective, beginning after `ready.event`. At the end that event is
// recorded again, to fire when the results are on the GPU.
void Staging::stage(const Point& ready, const Operation& operation, int ranks,
                    const std::vector<Array>& arrays, const std::function<void()>& begin,
                    const Carry& carry) {
  Context& context = context_of(ready.context);
  const std::vector<Batch> batches = batches_of(operation, ranks, arrays);
  auto buffer_of = [&](size_t k) -> Buffer& { return context.buffers[k % kBuffers]; };
  auto to_host = [&](size_t k) {
    Buffer& buffer = buffer_of(k);
    // The results of the batch that was in the buffer before must have left it.
    cuda_.wait(buffer.gone);
    copy(context, buffer.table, batches[k].down(buffer.memory), context.down);
    cuda_.record(buffer.here, context.down);
  };
  // While batch k is carried out, batches k + 1 and k + 2 are copied to the host, and the results
  // of those before to the GPU. On an error, nothing may still write to the buffers or the arrays.
  try {
    cuda_.hold(context.down, ready.event);
    for (size_t k = 0; k < std::min(kAhead, batches.size()); ++k) to_host(k);
    for (size_t k = 0; k < batches.size(); ++k) {
      if (k + kAhead < batches.size()) to_host(k + kAhead);
      Buffer& buffer = buffer_of(k);
      const int64_t start = now();
      cuda_.wait(buffer.here);
      const int64_t here = now();
      if (k == 0) begin();
      carry(batches[k].staged(buffer.memory));
      waited_ns_ += here - start;
      carried_ns_ += now() - here;
      copy(context, buffer.table, batches[k].up(buffer.memory), context.up);
      cuda_.record(buffer.gone, context.up);
    }
    cuda_.record(ready.event, context.up);
  } catch (...) {
    for (const Cuda::Stream stream : {context.down, context.up}) {
      try {
        cuda_.finish(stream);
      } catch (const std::exception&) {  // the first error is the one to report
      }
    }
    throw;
  }
}

// Copy pieces: the small ones in one launch of the kernel, if there are several.
void Staging::copy(const Context& context, Cuda::Piece* table,
                   const std::vector<Cuda::Piece>& pieces, Cuda::Stream stream) const {
  auto small = [](const Cuda::Piece& piece) { return piece.bytes < kLargePiece; };
  const auto smalls = std::count_if(pieces.begin(), pieces.end(), small);
  const bool together = context.gather && smalls > kFewPieces && smalls <= kMostPieces;
  if (together) {
    std::copy_if(pieces.begin(), pieces.end(), table, small);
    cuda_.gather(context.gather, table, smalls, stream);
  }
  for (const Cuda::Piece& piece : pieces) {
    if (!together || !small(piece)) cuda_.copy(piece, stream);
  }
}

// Return what belongs to a CUDA context, and make it when it is first seen.
Staging::Context& Staging::context_of(void* handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Context& context = contexts_[handle];
  if (!context.down) context.down = cuda_.stream();
  if (!context.up) context.up = cuda_.stream();
  for (Buffer& buffer : context.buffers) {
    if (!buffer.memory) buffer.memory = cuda_.pinned(batch_bytes_ + 2 * kAlign);
    if (!buffer.table)
      buffer.table =
          reinterpret_cast<Cuda::Piece*>(cuda_.pinned(kMostPieces * sizeof(Cuda::Piece)));
    if (!buffer.here) buffer.here = cuda_.event();
    if (!buffer.gone) buffer.gone = cuda_.event();
  }
  if (!context.compiled) context.gather = cuda_.gather_kernel();
  context.compiled = true;
  return context;
}

}  // namespace jaxmpi
