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

  // `batch_bytes` are those of the operands and results of a batch.
  explicit Staging(const std::string& libcuda, int64_t batch_bytes = 4 << 20)
      : library_(libcuda), cuda_(libcuda), batch_bytes_(batch_bytes) {}

  const std::string& library() const { return library_; }

  // Carry out a collective on arrays of the GPU of `stream`, after all that is on the stream, and
  // before what is added to it afterwards. Call `begin` once the GPU has finished what was before,
  // and this rank is ready to communicate.
  void run(const Operation& operation, int ranks, const std::vector<Array>& arrays,
           Cuda::Stream stream, const std::function<void()>& begin, const Carry& carry);

  // Return an event that fires when all that is enqueued on `stream` so far is done. It is reused
  // once nobody holds it.
  struct Point {
    void* context;
    Cuda::Event event;
  };
  using Ready = std::shared_ptr<const Point>;
  Ready ready(Cuda::Stream stream);

  // Carry out a collective when `ready` fires, while the stream does what is enqueued on it later.
  // The results are there when it returns. Any thread may call it.
  void run_overlapped(const Ready& ready, const Operation& operation, int ranks,
                      const std::vector<Array>& arrays, const std::function<void()>& begin,
                      const Carry& carry);

  // The nanoseconds so far in which it waited for the GPU and its copies, and in which it carried
  // out collectives.
  int64_t waited_ns() const { return waited_ns_; }
  int64_t carried_ns() const { return carried_ns_; }

  // Wait for all that is on the stream.
  void finish(Cuda::Stream stream) const { cuda_.finish(stream); }

 private:
  // Pinned memory for a batch, and for the table of its small pieces.
  struct Buffer {
    char* memory = nullptr;
    Cuda::Piece* table = nullptr;
    Cuda::Event here = nullptr;  // fires when the batch is on the host
    Cuda::Event gone = nullptr;  // fires when its results are on the GPU
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
  // Guards the contexts: a message is started by one thread, and carried out by another.
  std::mutex mutex_;
  // By CUDA context: an event, a stream and a kernel belong to the one in which they were made.
  std::map<void*, Context> contexts_;
};

}  // namespace jaxmpi
