// Collectives on arrays of a GPU, staged through pinned memory of the host in batches. While one
// batch is reduced, the next ones are copied to the host, and finished ones back to the GPU, on one
// stream for each direction.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
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
  explicit Staging(const std::string& libcuda, int64_t batch_bytes = 4 << 20)
      : library_(libcuda), cuda_(libcuda), batch_bytes_(batch_bytes) {}

  const std::string& library() const { return library_; }

  // On arrays of the GPU of `stream`: after what is on the stream before, and before what it is
  // given afterwards. Calls `begin` once the GPU has done what is before, and this rank is ready to
  // communicate.
  void run(const Operation& operation, int ranks, const std::vector<Array>& arrays,
           Cuda::Stream stream, const std::function<void()>& begin, const Carry& carry);

  // An event that fires when all that is enqueued on `stream` so far is done. It is used again once
  // nobody has it.
  struct Point {
    void* context;
    Cuda::Event event;
  };
  using Ready = std::shared_ptr<const Point>;
  Ready ready(Cuda::Stream stream);

  // Like `run`, but starts when `ready` fires, and runs concurrently with what is enqueued on the
  // stream later. The results are there when it returns. Another thread may call it.
  void run_beside(const Ready& ready, const Operation& operation, int ranks,
                  const std::vector<Array>& arrays, const std::function<void()>& begin,
                  const Carry& carry);

  // Nanoseconds since the beginning: of waiting for the GPU and for copies from it, and of carrying
  // out.
  int64_t waited_ns() const { return waited_ns_; }
  int64_t carried_ns() const { return carried_ns_; }

  // Waits for all that the stream was given.
  void finish(Cuda::Stream stream) const { cuda_.finish(stream); }

 private:
  // Pinned memory for a batch, and for the table of its small pieces.
  struct Buffer {
    char* memory = nullptr;
    Cuda::Piece* table = nullptr;
    Cuda::Event here = nullptr,
                gone = nullptr;  // the batch on the host, and its results on the GPU
  };
  static constexpr size_t kBuffers = 4;
  struct Context {
    Cuda::Stream down = nullptr, up = nullptr;  // from the GPU, and to it
    Buffer buffers[kBuffers];
    bool compiled = false;
    Cuda::Kernel gather = nullptr;
    std::vector<Cuda::Event> unused;  // events, for `ready`
  };
  struct Batch;

  std::vector<Batch> batches_of(const Operation& operation, int ranks,
                                const std::vector<Array>& arrays) const;
  Context& context_of(void* handle);  // which is current
  void stage(const Point& ready, const Operation& operation, int ranks,
             const std::vector<Array>& arrays, const std::function<void()>& begin,
             const Carry& carry);
  void copy(const Context& context, Cuda::Piece* table, const std::vector<Cuda::Piece>& pieces,
            Cuda::Stream stream) const;

  const std::string library_;
  Cuda cuda_;
  const int64_t batch_bytes_;
  std::atomic<int64_t> waited_ns_ = 0, carried_ns_ = 0;
  std::mutex
      mutex_;  // of the contexts: a message is started by one thread, and carried out by another
  std::map<void*, Context>
      contexts_;  // an event, a stream and a kernel are of the context in which they were made
};

}  // namespace jaxmpi
