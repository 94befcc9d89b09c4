// How a rank writes to shared memory what others will read: by ordinary or by streaming stores.
//
// Ordinary stores leave the data in the caches of this core, where a rank that shares a cache finds
// it soonest. A core that shares none fetches each line from this core's cache, which takes longer
// than from memory: there, streaming stores, which go past the caches, are up to twice as fast.
// Nothing says which it is, and in a virtual machine it changes while the job runs. So it is tried:
// of every kPeriod large chunks, all ranks write the first kTrial the one way and the other in
// turn, and time what they do with them. Each decides for itself: where some of three ranks share a
// cache, what they decide may differ.
#pragma once

#include <array>
#include <cstdint>

#include "node.h"
#include "reduce.h"

namespace jaxmpi {

class StorePolicy {
 public:
  // Whether a large chunk is written past the caches. Large chunks are counted from the beginning
  // of the message, by all ranks of the node alike.
  bool streams(int64_t chunk) const {
    const int64_t at = (chunks_ + chunk) % kPeriod;
    return at < kTrial ? tried(at) : streaming_;
  }

  // Call f(), a step of this rank with a chunk of so many bytes, and time it: the work of the rank,
  // not its waits for others.
  template <class F>
  void time(int64_t chunk, int64_t bytes, F f) {
    const int64_t at = (chunks_ + chunk) % kPeriod;
    if (at == kDecided) decide();
    const int64_t start = at < kTrial ? now() : 0;
    f();
    if (streams(chunk)) fence();
    if (at < kTrial) spent_[at] += static_cast<double>(now() - start) / bytes;
  }

  // Count the large chunks of a message that is over.
  void end(int64_t chunks) { chunks_ += chunks; }

 private:
  static constexpr int64_t kTrial = 32, kPeriod = 2048;
  // The second half of a trial swaps the two ways: messages may have two chunks each, and the first
  // and the second chunk of a message take different times.
  static constexpr int64_t kHalf = kTrial / 2;
  // Chunks of each half that do not count: each slot must have been written in the way that is
  // timed.
  static constexpr int64_t kWarm = 4;
  // The chunk at which the ranks decide: before it is laid out, all chunks of the trial are taken.
  static constexpr int64_t kDecided = kTrial + 3;
  static bool tried(int64_t at) { return (at ^ at / kHalf) & 1; }
  void decide();

  bool streaming_ = false;
  int64_t chunks_ = 0;                     // of all messages before this one
  std::array<double, kTrial> spent_ = {};  // nanoseconds per byte of each chunk of the trial
};

}  // namespace jaxmpi
