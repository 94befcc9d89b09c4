// How a rank waits.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace jaxmpi {

// Backs off in three steps. It spins at first: a thread that yields is put behind all others of its
// core, and comes too late to the next message. Where ranks share cores, it yields soon, because
// the rank that it waits for may need the core. At last it sleeps for a share of the time that it
// has waited.
class Backoff {
 public:
  using Clock = std::chrono::steady_clock;
  // What is awaited: a rank of this node, any of many messages of other nodes, or one short
  // message. Messages may take milliseconds, and MPI must be called between any two turns. For one
  // short message it sleeps late, because the rank would wake up too late.
  enum class Awaited { kRank, kMessages, kShortMessage };
  explicit Backoff(bool crowded, Awaited what = Awaited::kRank)
      : crowded_(crowded),
        network_(what != Awaited::kRank),
        polling_(what == Awaited::kShortMessage ? kPollingShort : kPolling) {}

  // Begin anew, because what was awaited has come.
  void reset() { turns_ = 0; }

  // Wait for one turn; return whether it is time to check that the other ranks still live.
  bool pause() {
    // Only every kSpins turns look at the clock, which costs as much as many turns.
    if (++turns_ % kSpins != 0 && !((crowded_ || network_) && turns_ > kSpins)) {
      relax();
      return false;
    }
    const auto now = Clock::now();
    if (turns_ <= kSpins) start_ = looked_ = now;
    const auto waited = now - start_;
    if (network_ ? waited > polling_ && turns_ % kLooks == 0
                 : waited > (crowded_ ? kYielding : kSpinning)) {
      std::this_thread::sleep_for(network_ ? std::min<Clock::duration>(waited / 32, kLongestPoll)
                                           : std::min<Clock::duration>(waited / 16, kLongestSleep));
    } else if (crowded_ || network_) {
      sched_yield();
    }
    if (now - looked_ < kLooking) return false;
    looked_ = now;
    return true;
  }

  // Tell the processor that this thread spins.
  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

 private:
  static constexpr int64_t kSpins = 64;  // between two looks at the clock
  static constexpr int64_t kLooks =
      8;  // between two sleeps: MPI takes several to receive one message
  static constexpr auto kSpinning = std::chrono::microseconds(200),
                        kYielding = std::chrono::microseconds(1000);
  static constexpr auto kLongestSleep = std::chrono::microseconds(1000),
                        kLooking = std::chrono::microseconds(200'000);
  static constexpr auto kPolling = std::chrono::microseconds(100),
                        kPollingShort = std::chrono::microseconds(2000);
  static constexpr auto kLongestPoll = std::chrono::microseconds(500);

  const bool crowded_, network_;
  const std::chrono::microseconds polling_;
  int64_t turns_ = 0;
  Clock::time_point start_, looked_;
};

}  // namespace jaxmpi
