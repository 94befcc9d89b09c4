#pragma once

#include <chrono>
#include <cstdint>

namespace jaxmpi {

// Nanoseconds of the steady clock, which is Python's `time.monotonic_ns`.
inline int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace jaxmpi
