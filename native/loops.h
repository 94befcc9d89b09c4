// One set of loops for each kind of processor.
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

#if defined(__x86_64__)
namespace v3 {
extern const Loops loops;  // AVX2 and F16C
}
namespace v4 {
extern const Loops loops;  // AVX-512
}
#else
namespace v1 {
extern const Loops loops;
}
#endif

}  // namespace jaxmpi
