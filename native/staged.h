// Collectives on arrays of a GPU: through pinned memory of the host, in batches, so that the next batch is copied while this
// one is reduced.
#pragma once

#include <string>
#include <vector>

#include "cuda.h"
#include "transport.h"

namespace jaxmpi {

class Staging {
 public:
  explicit Staging(const std::string& libcuda) : cuda_(libcuda) {}

  // As Transport::run, for arrays of the GPU of `stream`: after what is on the stream before, and before what comes after.
  void run(Transport& transport, Kind kind, Op op, int divisor, int64_t word, const std::vector<Array>& arrays,
           Cuda::Stream stream);

 private:
  struct Batch;
  Cuda cuda_;
  char* memory_[2] = {};        // of the batches in turn
  Cuda::Event copied_[2] = {};  // to the host
};

}  // namespace jaxmpi
