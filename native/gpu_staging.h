// Collectives on arrays of a GPU: through pinned memory of the host, in batches, so that the next batch is copied while this
// one is reduced.
#pragma once

#include <functional>
#include <map>
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

 private:
  struct Batch;
  struct Buffers {
    char* memory[2] = {};        // of the batches in turn
    Cuda::Event copied[2] = {};  // to the host
  };
  Buffers& buffers_of(void* context);

  Cuda cuda_;
  std::map<void*, Buffers> buffers_;  // of each context: an event is of the one in which it was made
};

}  // namespace jaxmpi
