#include "node.h"

#include <fcntl.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace jaxmpi {
namespace {

constexpr int64_t kLine = 128;  // bytes that two ranks should not write to: a cache line and its neighbour

using Clock = std::chrono::steady_clock;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// How a rank waits. It spins at first: a thread that yields is put behind all others of its core, and then it comes too late to
// the next message. Where ranks share cores, it yields soon, as the one it waits for may need its core. At last it sleeps for a
// share of the time that it has waited.
class Patience {
 public:
  explicit Patience(bool crowded) : crowded_(crowded) {}

  // Returns whether it is time to look whether the others still live.
  bool pause() {
    if (++turns_ % kSpins != 0 && !(crowded_ && turns_ > kSpins)) {
      relax();
      return false;
    }
    const auto now = Clock::now();
    if (turns_ <= kSpins) start_ = looked_ = now;
    const auto waited = now - start_;
    if (waited > (crowded_ ? kYielding : kSpinning)) {
      std::this_thread::sleep_for(std::min<Clock::duration>(waited / 16, kLongestSleep));
    } else if (crowded_) {
      sched_yield();
    }
    if (now - looked_ < kLooking) return false;
    looked_ = now;
    return true;
  }

 private:
  static constexpr int64_t kSpins = 64;  // between two looks at the clock
  static constexpr auto kSpinning = std::chrono::microseconds(200), kYielding = std::chrono::microseconds(1000);
  static constexpr auto kLongestSleep = std::chrono::microseconds(1000), kLooking = std::chrono::microseconds(200'000);

  const bool crowded_;
  int64_t turns_ = 0;
  Clock::time_point start_, looked_;
};

// The lock that says that a rank lives: the kernel takes it away when the process ends, however it does.
struct flock lock_of(int rank) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

}  // namespace

int64_t now() { return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count(); }

// What a rank says to the others: how many chunks it has laid out, reduced and taken since the beginning.
struct Node::Post {
  alignas(kLine) std::atomic<uint64_t> laid_out;
  int64_t word[2];  // of this message and the one before, which a slower rank may still be reading
  alignas(kLine) std::atomic<uint64_t> reduced;
  alignas(kLine) std::atomic<uint64_t> taken;
  std::atomic<uint64_t> broken;  // 1 once a message has failed on this rank: its counters mean nothing from then on
  // Of the node's first rank: what it has heard from the other nodes, and about how many messages.
  alignas(kLine) Extremes everywhere[2];
  std::atomic<uint64_t> heard;
};

int64_t Node::Layout::bytes() const { return size * (static_cast<int64_t>(sizeof(Post)) + slots * slot_bytes); }

Node::Node(const Layout& layout, char* memory, int file) : layout_(layout), memory_(memory), file_(file) {
  struct flock lock = lock_of(layout_.rank);
  if (fcntl(file_, F_SETLK, &lock) != 0) throw std::runtime_error("the shared-memory file of the node cannot be locked");
}

Node::Post& Node::post(int rank) const { return *reinterpret_cast<Post*>(memory_ + rank * sizeof(Post)); }

char* Node::slot(int rank, int64_t chunk) const {
  const int64_t index = (chunks_ + chunk) % layout_.slots;
  return memory_ + layout_.size * sizeof(Post) + (rank * layout_.slots + index) * layout_.slot_bytes;
}

void Node::wait(Counter counter, uint64_t value) {
  for (int rank = 0; rank < layout_.size; ++rank) {
    if (rank != layout_.rank) wait_for(rank, counter, value);
  }
}

void Node::wait_for(int rank, Counter counter, uint64_t value) {
  const auto& theirs = post(rank).*counter;
  Patience patience(layout_.crowded);
  while (theirs.load(std::memory_order_acquire) < value) {
    if (!patience.pause()) continue;
    const bool gone = is_gone(rank), broken = post(rank).broken;
    if ((gone || broken) && theirs.load(std::memory_order_acquire) < value) {
      throw RankLost("local rank " + std::to_string(rank) + " of this node has " + (gone ? "ended" : "failed in a message"));
    }
  }
}

bool Node::is_gone(int rank) const {
  struct flock lock = lock_of(rank);
  return fcntl(file_, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

Extremes Node::agree(const Message& message, const std::function<Extremes(Extremes)>& everywhere) {
  const int parity = messages_ & 1;
  wait(&Post::laid_out, chunks_ + 1);
  met_ = now();
  Extremes extremes = {message.word, message.word};
  for (int rank = 0; rank < layout_.size; ++rank) {
    const int64_t word = rank == layout_.rank ? message.word : post(rank).word[parity];
    extremes = {std::min(extremes.smallest, word), std::max(extremes.largest, word)};
  }
  if (!everywhere) return extremes;
  Post& first = post(0);
  if (layout_.rank == 0) {
    first.everywhere[parity] = everywhere(extremes);
    first.heard.store(messages_ + 1, std::memory_order_release);
  } else {
    wait_for(0, &Post::heard, messages_ + 1);
  }
  return first.everywhere[parity];
}

Extremes Node::exchange(const Message& message, const std::function<Extremes(Extremes)>& everywhere) {
  Post& mine = post(layout_.rank);
  if (mine.broken) throw std::runtime_error("an earlier message has failed on this rank: nothing more can be sent");
  try {
    return pass(message, everywhere);
  } catch (...) {
    mine.broken = 1;
    throw;
  }
}

Extremes Node::pass(const Message& message, const std::function<Extremes(Extremes)>& everywhere) {
  Post& mine = post(layout_.rank);
  const uint64_t first = chunks_;
  const int64_t chunks = std::max<int64_t>(message.chunks, 1);  // a message of nothing is one chunk of nothing
  auto lay_out = [&](int64_t chunk) {
    const uint64_t end = first + chunk + 1;
    if (end > static_cast<uint64_t>(layout_.slots)) wait(&Post::taken, end - layout_.slots);
    if (message.chunks) message.lay_out(chunk);
    mine.laid_out.store(end, std::memory_order_release);
  };
  mine.word[messages_ & 1] = message.word;
  lay_out(0);
  const Extremes extremes = agree(message, everywhere);
  const bool agreed = extremes.smallest == extremes.largest;
  const int64_t last = agreed ? chunks : 1;
  if (agreed && message.chunks) {
    for (int64_t chunk = 0; chunk <= chunks; ++chunk) {
      if (chunk + 1 < chunks) lay_out(chunk + 1);
      if (chunk < chunks) {
        wait(&Post::laid_out, first + chunk + 1);
        message.reduce(chunk);
        mine.reduced.store(first + chunk + 1, std::memory_order_release);
        if (!message.take) mine.taken.store(first + chunk + 1, std::memory_order_release);
      }
      if (message.take && chunk > 0) {
        wait(&Post::reduced, first + chunk);
        message.take(chunk - 1);
        mine.taken.store(first + chunk, std::memory_order_release);
      }
    }
  } else {
    mine.reduced.store(first + last, std::memory_order_release);
    mine.taken.store(first + last, std::memory_order_release);
  }
  chunks_ = first + last;
  ++messages_;
  return extremes;
}

}  // namespace jaxmpi
