#include "node.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

#include "backoff.h"

namespace jaxmpi {
namespace {

// Bytes within which two ranks must not both write: a cache line and the neighbor that the
// processor prefetches with it.
constexpr int64_t kLine = 128;

// The lock that shows that a rank lives. The kernel releases it when the process ends, even by
// SIGKILL, so nobody has to be told of a death.
struct flock lock_of(int rank) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

}  // namespace

// What a rank publishes in shared memory. Each counter has cache lines of its own, so that a rank
// that polls one is not disturbed by stores to another.
struct Node::RankState {
  alignas(kLine) std::atomic<uint64_t> laid_out;
  // Of this message and of the one before, which a slower rank may still be reading.
  int64_t fingerprint[2];
  alignas(kLine) std::atomic<uint64_t> reduced;
  alignas(kLine) std::atomic<uint64_t> taken;
  // 1 once a message has failed on this rank: its counters mean nothing from then on.
  std::atomic<uint64_t> broken;
  // Of the node's first rank: the range over all nodes, of this message and of the one before, and
  // for how many messages it is known.
  alignas(kLine) FingerprintRange across_nodes[2];
  std::atomic<uint64_t> compared;
};

int64_t Node::Layout::bytes() const {
  return size * (static_cast<int64_t>(sizeof(RankState)) + slots * slot_bytes);
}

Node::Node(const Layout& layout, char* memory, int file)
    : layout_(layout), memory_(memory), file_(file) {
  struct flock lock = lock_of(layout_.rank);
  if (fcntl(file_, F_SETLK, &lock) != 0)
    throw std::runtime_error("the shared-memory file of the node cannot be locked");
}

void Node::leave() {
  struct flock lock = lock_of(layout_.rank);
  lock.l_type = F_UNLCK;
  fcntl(file_, F_SETLK, &lock);
}

Node::RankState& Node::state(int rank) const {
  return *reinterpret_cast<RankState*>(memory_ + rank * sizeof(RankState));
}

void Node::fail() { state(layout_.rank).broken = 1; }

char* Node::slot(int rank, int64_t chunk) const {
  const int64_t index = (chunks_ + chunk) % layout_.slots;
  return memory_ + layout_.size * sizeof(RankState) +
         (rank * layout_.slots + index) * layout_.slot_bytes;
}

void Node::wait(Counter counter, uint64_t value) {
  for (int rank = 0; rank < layout_.size; ++rank) {
    if (rank != layout_.rank) wait_for(rank, counter, value);
  }
}

void Node::wait_for(int rank, Counter counter, uint64_t value) {
  const auto& theirs = state(rank).*counter;
  Backoff backoff(layout_.crowded);
  // Acquire: what the other rank wrote before it stored the counter is visible afterwards.
  while (theirs.load(std::memory_order_acquire) < value) {
    if (!backoff.pause()) continue;
    // The counter is read once more after the look at the rank: it may have stored the value and
    // then ended, which is no loss.
    const bool gone = is_gone(rank), broken = state(rank).broken;
    if ((gone || broken) && theirs.load(std::memory_order_acquire) < value) {
      throw_lost(rank, gone);
    }
  }
}

void Node::throw_lost(int rank, bool gone) const {
  const int name = layout_.names.empty() ? rank : layout_.names.at(rank);
  throw RankLost("local rank " + std::to_string(name) + " of this node has " +
                 (gone ? "ended" : "failed in a message"));
}

bool Node::is_gone(int rank) const {
  // F_GETLK answers F_UNLCK where nobody holds a lock that conflicts with this one.
  struct flock lock = lock_of(rank);
  return fcntl(file_, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

bool Node::have(Counter counter, uint64_t value) const {
  for (int rank = 0; rank < layout_.size; ++rank) {
    if (rank != layout_.rank && (state(rank).*counter).load(std::memory_order_acquire) < value)
      return false;
  }
  return true;
}

std::vector<int> Node::missing_ranks() const {
  const uint64_t mine = state(layout_.rank).laid_out.load(std::memory_order_acquire);
  std::vector<int> ranks;
  for (int rank = 0; rank < layout_.size; ++rank) {
    if (state(rank).laid_out.load(std::memory_order_acquire) < mine) ranks.push_back(rank);
  }
  return ranks;
}

void Node::look_for_lost(uint64_t end) const {
  for (int rank = 0; rank < layout_.size; ++rank) {
    if (rank == layout_.rank) continue;
    const bool gone = is_gone(rank), broken = state(rank).broken;
    if ((gone || broken) && state(rank).taken.load(std::memory_order_acquire) < end) {
      throw_lost(rank, gone);
    }
  }
}

FingerprintRange Node::agree(const Message& message) {
  const int parity = messages_ & 1;
  // `laid_out` of the first chunk also publishes the fingerprint, which was stored before it.
  wait(&RankState::laid_out, chunks_ + 1);
  all_entered_ns_ = now();
  FingerprintRange range = {message.fingerprint, message.fingerprint};
  for (int rank = 0; rank < layout_.size; ++rank) {
    if (rank == layout_.rank) continue;
    const int64_t theirs = state(rank).fingerprint[parity];
    range = range.with({theirs, theirs});
  }
  if (!message.across_nodes) return range;

  // The first rank compares with the other nodes, and the others of the node read what it found.
  // It overwrites no entry that is still being read: at this point all ranks of the node have
  // entered this message, and so have left those before it.
  RankState& first = state(0);
  if (layout_.rank == 0) {
    first.across_nodes[parity] = message.across_nodes(range);
    first.compared.store(messages_ + 1, std::memory_order_release);
  } else {
    wait_for(0, &RankState::compared, messages_ + 1);
  }
  all_entered_ns_ = now();
  return first.across_nodes[parity];
}

FingerprintRange Node::exchange(const Message& message) {
  RankState& mine = state(layout_.rank);
  if (mine.broken)
    throw std::runtime_error(
        "an earlier message has failed on this rank: nothing more can be sent");
  try {
    return pass(message);
  } catch (...) {
    fail();
    throw;
  }
}

FingerprintRange Node::pass(const Message& message) {
  RankState& mine = state(layout_.rank);
  mine.fingerprint[messages_ & 1] = message.fingerprint;
  // The slot of the first chunk is free once all have taken the chunk that was in it before.
  if (chunks_ + 1 > static_cast<uint64_t>(layout_.slots))
    wait(&RankState::taken, chunks_ + 1 - layout_.slots);
  if (message.chunks) message.lay_out(0);
  mine.laid_out.store(chunks_ + 1, std::memory_order_release);

  // Sent before the ranks have agreed, a small message between nodes costs one delay, not two.
  if (message.send_ahead) message.send_ahead();
  const FingerprintRange range = agree(message);
  const bool agreed = range.equal();
  if (agreed && message.agreed) message.agreed();
  if (!agreed && message.give_up) message.give_up();

  if (agreed && message.chunks && !message.at_once) {
    message.advance ? pass_between(message) : pass_within(message);
  } else {
    // Nothing is left to exchange: the ranks differ, the message is empty, or `agree` has reduced
    // the only chunk. The counters still advance by one chunk, or the next message would see those
    // of this one.
    if (agreed && message.chunks && message.take) message.take(0);
    mine.reduced.store(chunks_ + 1, std::memory_order_release);
    mine.taken.store(chunks_ + 1, std::memory_order_release);
  }
  chunks_ += agreed ? std::max<int64_t>(message.chunks, 1) : 1;
  ++messages_;
  return range;
}

// Carry out the chunks of a message within one node, of which the first is laid out. The steps of
// three chunks overlap: k + 1 is laid out, k reduced, k - 1 taken. So a rank has something to do
// while the others finish a step, and no step waits for the step just before it.
void Node::pass_within(const Message& message) {
  RankState& mine = state(layout_.rank);
  const uint64_t first = chunks_;
  const int64_t chunks = message.chunks;
  for (int64_t chunk = 0; chunk <= chunks; ++chunk) {
    if (chunk + 1 < chunks) {
      // Chunk k + 1 may overwrite its slot once all have taken the chunk `slots` before it.
      const uint64_t end = first + chunk + 2;
      if (end > static_cast<uint64_t>(layout_.slots)) wait(&RankState::taken, end - layout_.slots);
      message.lay_out(chunk + 1);
      mine.laid_out.store(end, std::memory_order_release);
    }
    if (chunk < chunks) {
      wait(&RankState::laid_out, first + chunk + 1);
      message.reduce(chunk);
      mine.reduced.store(first + chunk + 1, std::memory_order_release);
      // Without `take`, nothing of the other ranks' slots is read after this.
      if (!message.take) mine.taken.store(first + chunk + 1, std::memory_order_release);
    }
    if (message.take && chunk > 0) {
      wait(&RankState::reduced, first + chunk);
      message.take(chunk - 1);
      mine.taken.store(first + chunk, std::memory_order_release);
    }
  }
}

// Carry out the chunks of a message between nodes, of which the first is laid out. As many chunks
// are in transit as there are slots. Each turn of the loop does whichever steps can begin, and
// never blocks: a rank that waited for one chunk would not serve MPI's messages of the others.
void Node::pass_between(const Message& message) {
  RankState& mine = state(layout_.rank);
  const uint64_t first = chunks_, slots = layout_.slots;
  const int64_t chunks = message.chunks;
  // Of this message's chunks, how many have passed each step on this rank:
  // chunks >= laid_out >= begun >= reduced >= taken.
  int64_t laid_out = 1, begun = 0, reduced = 0, taken = 0;
  Backoff backoff(layout_.crowded, Backoff::Awaited::kMessages);
  while (taken < chunks) {
    bool moved = message.advance();
    if (begun < laid_out && have(&RankState::laid_out, first + begun + 1)) {
      message.reduce(begun++);
      moved = true;
    }
    if (reduced < begun && message.is_reduced(reduced)) {
      mine.reduced.store(first + ++reduced, std::memory_order_release);
      moved = true;
    }
    if (taken < reduced && (!message.take || have(&RankState::reduced, first + taken + 1))) {
      if (message.take) message.take(taken);
      mine.taken.store(first + ++taken, std::memory_order_release);
      moved = true;
    }
    // A slot is free once this rank and all others have taken the chunk that was in it before.
    const uint64_t end = first + laid_out + 1;
    if (laid_out < chunks && first + taken + slots >= end &&
        (end <= slots || have(&RankState::taken, end - slots))) {
      message.lay_out(laid_out++);
      mine.laid_out.store(end, std::memory_order_release);
      moved = true;
    }
    if (moved) {
      backoff.reset();
    } else if (backoff.pause()) {
      look_for_lost(first + chunks);
    }
  }
}

}  // namespace jaxmpi
