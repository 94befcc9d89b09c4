// Collectives on arrays of a GPU: through pinned memory of the host, in batches, so that the next batch is copied while this
// one is reduced. A message may have a stream of its own, beside which the GPU goes on.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "cuda.h"
#include "transport.h"

namespace jaxmpi {

class Staging {
 public:
  explicit Staging(const std::string& libcuda) : cuda_(libcuda) {}

  // As Transport::run, for arrays of the GPU of `stream`: after what is on the stream before, and before what comes after.
  // Calls `begin` once the GPU has done what is before, and this rank is ready to communicate.
  void run(Transport& transport, const Operation& operation, int64_t word, const std::vector<Array>& arrays,
           Cuda::Stream stream, const std::function<void()>& begin);

  // A stream for messages beside `stream`, and an event at which that has done what it was given so far.
  struct Beside {
    Cuda::Stream stream;
    Cuda::Event ready;
  };
  Beside beside(Cuda::Stream stream);

  // The same as `run`, on that stream, from the event on; another thread may call it.
  void run_beside(const Beside& beside, Transport& transport, const Operation& operation, int64_t word,
                  const std::vector<Array>& arrays, const std::function<void()>& begin);

 private:
  struct Batch;
  struct Buffers {
    char* memory[2] = {};        // of the batches in turn
    Cuda::Event copied[2] = {};  // to the host
    Cuda::Stream beside = nullptr;
    std::vector<Cuda::Event> ready;  // that no message has
  };
  Buffers& buffers_of(void* context);

  Cuda cuda_;
  std::mutex mutex_;                  // of the buffers: a message is started by one thread, and carried out by another
  std::map<void*, Buffers> buffers_;  // of each context: an event is of the one in which it was made
};

}  // namespace jaxmpi
