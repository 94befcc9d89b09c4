#include "node.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

#include "patience.h"

namespace jaxmpi {
namespace {

constexpr int64_t kLine =
    128;  // bytes that two ranks should not write to: a cache line and its neighbour

// The lock that says that a rank lives: the kernel takes it away when the process ends, however it
// does.
struct flock lock_of(int rank) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

}  // namespace

// What a rank says to the others: how many chunks it has laid out, reduced and taken since the
// beginning.
struct Node::Post {
  alignas(kLine) std::atomic<uint64_t> laid_out;
  int64_t word[2];  // of this message and the one before, which a slower rank may still be reading
  alignas(kLine) std::atomic<uint64_t> reduced;
  alignas(kLine) std::atomic<uint64_t> taken;
  std::atomic<uint64_t>
      broken;  // 1 once a message has failed on this rank: its counters mean nothing from then on
  // Of the node's first rank: what it has heard from the other nodes, and about how many messages.
  alignas(kLine) Extremes everywhere[2];
  std::atomic<uint64_t> heard;
};

int64_t Node::Layout::bytes() const {
  return size * (static_cast<int64_t>(sizeof(Post)) + slots * slot_bytes);
}

Node::Node(const Layout& layout, char* memory, int file)
    : layout_(layout), memory_(memory), file_(file) {
  struct flock lock = lock_of(layout_.rank);
  if (fcntl(file_, F_SETLK, &lock) != 0)
    throw std::runtime_error("the shared-memory file of the node cannot be locked");
}

Node::Post& Node::post(int rank) const {
  return *reinterpret_cast<Post*>(memory_ + rank * sizeof(Post));
}

void Node::fail() { post(layout_.rank).broken = 1; }

char* Node::slot(int rank, int64_t chunk) const {
  const int64_t index = (chunks_ + chunk) % layout_.slots;
  return memory_ + layout_.size * sizeof(Post) +
         (rank * layout_.slots + index) * layout_.slot_bytes;
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
  struct flock lock = lock_of(rank);
  return fcntl(file_, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

bool Node::have(Counter counter, uint64_t value) const {
  for (int rank = 0; rank < layout_.size; ++rank) {
    if (rank != layout_.rank && (post(rank).*counter).load(std::memory_order_acquire) < value)
      return false;
  }
  return true;
}

void Node::look_for_lost(uint64_t end) const {
  for (int rank = 0; rank < layout_.size; ++rank) {
    if (rank == layout_.rank) continue;
    const bool gone = is_gone(rank), broken = post(rank).broken;
    if ((gone || broken) && post(rank).taken.load(std::memory_order_acquire) < end) {
      throw_lost(rank, gone);
    }
  }
}

Extremes Node::agree(const Message& message) {
  const int parity = messages_ & 1;
  wait(&Post::laid_out, chunks_ + 1);
  met_ = now();
  Extremes extremes = {message.word, message.word};
  for (int rank = 0; rank < layout_.size; ++rank) {
    const int64_t word = rank == layout_.rank ? message.word : post(rank).word[parity];
    extremes = {std::min(extremes.smallest, word), std::max(extremes.largest, word)};
  }
  if (!message.everywhere) return extremes;
  Post& first = post(0);
  if (layout_.rank == 0) {
    first.everywhere[parity] = message.everywhere(extremes);
    first.heard.store(messages_ + 1, std::memory_order_release);
  } else {
    wait_for(0, &Post::heard, messages_ + 1);
  }
  met_ = now();
  return first.everywhere[parity];
}

Extremes Node::exchange(const Message& message) {
  Post& mine = post(layout_.rank);
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

Extremes Node::pass(const Message& message) {
  Post& mine = post(layout_.rank);
  mine.word[messages_ & 1] = message.word;
  if (chunks_ + 1 > static_cast<uint64_t>(layout_.slots))
    wait(&Post::taken, chunks_ + 1 - layout_.slots);
  if (message.chunks) message.lay_out(0);
  mine.laid_out.store(chunks_ + 1, std::memory_order_release);
  if (message.send_ahead) message.send_ahead();
  const Extremes extremes = agree(message);
  const bool agreed = extremes.smallest == extremes.largest;
  if (agreed && message.agreed) message.agreed();
  if (!agreed && message.give_up) message.give_up();
  if (agreed && message.chunks && !message.at_once) {
    message.advance ? pass_between(message) : pass_within(message);
  } else {
    if (agreed && message.chunks && message.take) message.take(0);
    mine.reduced.store(chunks_ + 1, std::memory_order_release);
    mine.taken.store(chunks_ + 1, std::memory_order_release);
  }
  chunks_ += agreed ? std::max<int64_t>(message.chunks, 1)
                    : 1;  // a message of nothing is one chunk of nothing
  ++messages_;
  return extremes;
}

// After the first chunk is laid out.
void Node::pass_within(const Message& message) {
  Post& mine = post(layout_.rank);
  const uint64_t first = chunks_;
  const int64_t chunks = message.chunks;
  for (int64_t chunk = 0; chunk <= chunks; ++chunk) {
    if (chunk + 1 < chunks) {
      const uint64_t end = first + chunk + 2;
      if (end > static_cast<uint64_t>(layout_.slots)) wait(&Post::taken, end - layout_.slots);
      message.lay_out(chunk + 1);
      mine.laid_out.store(end, std::memory_order_release);
    }
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
}

// The same with as many chunks on their way as there are slots: each stage of a chunk begins when
// it can, and nothing waits for anything else.
void Node::pass_between(const Message& message) {
  Post& mine = post(layout_.rank);
  const uint64_t first = chunks_, slots = layout_.slots;
  const int64_t chunks = message.chunks;
  int64_t laid_out = 1, begun = 0, reduced = 0, taken = 0;
  Patience patience(layout_.crowded, Patience::For::kMessages);
  while (taken < chunks) {
    bool moved = message.advance();
    if (begun < laid_out && have(&Post::laid_out, first + begun + 1)) {
      message.reduce(begun++);
      moved = true;
    }
    if (reduced < begun && message.is_reduced(reduced)) {
      mine.reduced.store(first + ++reduced, std::memory_order_release);
      moved = true;
    }
    if (taken < reduced && (!message.take || have(&Post::reduced, first + taken + 1))) {
      if (message.take) message.take(taken);
      mine.taken.store(first + ++taken, std::memory_order_release);
      moved = true;
    }
    const uint64_t end = first + laid_out + 1;
    if (laid_out < chunks && first + taken + slots >= end &&
        (end <= slots || have(&Post::taken, end - slots))) {
      message.lay_out(laid_out++);
      mine.laid_out.store(end, std::memory_order_release);
      moved = true;
    }
    if (moved) {
      patience.reset();
    } else if (patience.pause()) {
      look_for_lost(first + chunks);
    }
  }
}

}  // namespace jaxmpi
