// Collectives on arrays of a GPU: through pinned memory of the host, in batches. While one batch is carried out, the next ones
// come from the GPU, and those before go back to it, each way on a stream of its own.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "call.h"
#include "cuda.h"

namespace jaxmpi {

class Staging {
 public:
  // Carries out the collective on some columns of the arrays, in memory of the host.
  using Carry = std::function<void(std::vector<Array>)>;

  // batch_bytes: of the operands and results of a batch.
  explicit Staging(const std::string& libcuda, int64_t batch_bytes = 4 << 20) : cuda_(libcuda), batch_bytes_(batch_bytes) {}

  // On arrays of the GPU of `stream`: after what is on the stream before, and before what it is given afterwards. Calls `begin`
  // once the GPU has done what is before, and this rank is ready to communicate.
  void run(const Operation& operation, int ranks, const std::vector<Array>& arrays, Cuda::Stream stream,
           const std::function<void()>& begin, const Carry& carry);

  // When `stream` has done what it was given so far.
  struct Ready {
    void* context;
    Cuda::Event event;
  };
  Ready ready(Cuda::Stream stream);

  // The same as `run` from then on, beside what the stream is given meanwhile. The results are there when it returns. Another
  // thread may call it.
  void run_beside(const Ready& ready, const Operation& operation, int ranks, const std::vector<Array>& arrays,
                  const std::function<void()>& begin, const Carry& carry);

  // Nanoseconds since the beginning: of waiting for the GPU and for copies from it, and of carrying out.
  int64_t waited_ns() const { return waited_ns_; }
  int64_t carried_ns() const { return carried_ns_; }

  // Waits for all that the stream was given.
  void finish(Cuda::Stream stream) const { cuda_.finish(stream); }

 private:
  // Pinned memory for a batch, and for the table of its small pieces.
  struct Buffer {
    char* memory = nullptr;
    Cuda::Piece* table = nullptr;
    Cuda::Event here = nullptr, gone = nullptr;  // the batch on the host, and its results on the GPU
  };
  static constexpr size_t kBuffers = 4;
  struct Context {
    Cuda::Stream down = nullptr, up = nullptr;  // from the GPU, and to it
    Buffer buffers[kBuffers];
    bool compiled = false;
    Cuda::Kernel gather = nullptr;
    std::vector<Cuda::Event> ready;  // that nobody has
  };
  struct Batch;

  std::vector<Batch> batches_of(const Operation& operation, int ranks, const std::vector<Array>& arrays) const;
  Context& context_of(void* handle);  // which is current
  void give_back(const Ready& ready);
  void stage(const Ready& ready, const Operation& operation, int ranks, const std::vector<Array>& arrays,
             const std::function<void()>& begin, const Carry& carry);
  void copy(const Context& context, Cuda::Piece* table, const std::vector<Cuda::Piece>& pieces, Cuda::Stream stream) const;

  Cuda cuda_;
  const int64_t batch_bytes_;
  std::atomic<int64_t> waited_ns_ = 0, carried_ns_ = 0;
  std::mutex mutex_;                   // of the contexts: a message is started by one thread, and carried out by another
  std::map<void*, Context> contexts_;  // an event, a stream and a kernel are of the context in which they were made
};

}  // namespace jaxmpi
