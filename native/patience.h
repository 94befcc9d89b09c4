// How a rank waits.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace jaxmpi {

// It spins at first: a thread that yields is put behind all others of its core, and then it comes
// too late to the next message. Where ranks share cores, it yields soon, as the one it waits for
// may need its core. At last it sleeps for a share of the time that it has waited.
class Patience {
 public:
  using Clock = std::chrono::steady_clock;
  // What it waits for. Messages of another node may take milliseconds, and it looks at what arrives
  // between any two turns; while it waits for one short message it sleeps late, as the rank would
  // wake up too late.
  enum class For { kRank, kMessages, kShortMessage };
  explicit Patience(bool crowded, For what = For::kRank)
      : crowded_(crowded),
        network_(what != For::kRank),
        polling_(what == For::kShortMessage ? kPollingShort : kPolling) {}

  // What was waited for has come.
  void reset() { turns_ = 0; }

  // Returns whether it is time to look whether the others still live.
  bool pause() {
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

  // Between two looks of a thread that spins.
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
