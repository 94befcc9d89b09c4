// The arithmetic of reductions (sum, divide, round to 16 bits): one set of loops for each kind of
// processor.
#pragma once

#include "reduce.h"

namespace jaxmpi {

struct Loops {
  decltype(&::jaxmpi::combine) combine;
  decltype(&::jaxmpi::combine_wide) combine_wide;
  decltype(&::jaxmpi::finish) finish;
  decltype(&::jaxmpi::reduce) reduce;
  decltype(&::jaxmpi::copy_bytes) copy_bytes;
  decltype(&::jaxmpi::stream_bytes) stream_bytes;
};

namespace v1 {
extern const Loops loops;  // any processor
}
namespace v3 {
extern const Loops loops;  // x86-64 with AVX2 and F16C
}
namespace v4 {
extern const Loops loops;  // x86-64 with AVX-512
}

}  // namespace jaxmpi
