// The last messages of this process, for the flight recorder, the stall watch and `jaxmpi top`.
#pragma once

#include <atomic>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "transport.h"

namespace jaxmpi::record {

// Marks a message as the last one, from when this rank is ready to communicate; under the
// transport's mutex.
class Entered {
 public:
  Entered(const Transport& transport, int64_t word, int64_t bytes);
  ~Entered();
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;

 private:
  struct Event& event_;
  const Transport& transport_;
};

// Adds the time for which a program waits, and does nothing else.
class Exposed {
 public:
  ~Exposed();

 private:
  const int64_t start_ = now();
};
int64_t exposed_ns();

// When the last of these waits began and ended, in nanoseconds of the steady clock, in the order of
// their ends.
std::vector<std::pair<int64_t, int64_t>> last_waits();

// How many have begun, and how many of them have ended.
std::pair<int64_t, int64_t> messages();

// The word of the last message.
int64_t word();

// number, word, bytes, start, met, end. Times are nanoseconds of the steady clock: when this rank
// entered it, when all ranks had, and when it was done here; 0 for what has not happened yet.
std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>> last_events();

}  // namespace jaxmpi::record
