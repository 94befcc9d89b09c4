// The ranks of one node: how they pass arrays to each other through shared memory.
//
// All messages of all ranks are one sequence of chunks, counted from the beginning. Each rank has a
// few slots, which its chunks use in turn, and three counters, which only it writes:
//
//   laid_out  this rank's part of so many chunks is in its slots
//   reduced   this rank's share of so many chunks is reduced, and in its slots for the others
//   taken     this rank needs nothing more of so many chunks
//
// Before it lays out a chunk, a rank waits until all have taken what was in that slot before;
// before it reduces, until all have laid out; before it takes, until all have reduced. A rank lays
// out chunk k + 1 before it reduces chunk k, and then takes chunk k - 1, so it seldom waits.
//
// A counter is stored with release order after the memory that it speaks of, and loaded with
// acquire order before that memory is read: the counters are the only synchronization.
//
// The fingerprint of a message goes with its first chunk. No rank is more than one message ahead of
// another, because it waits for the first chunks of all: two fingerprints of each rank are enough.
// Where the fingerprints differ, every rank leaves the message after its first chunk, and all
// counters are equal again.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "clock.h"

namespace jaxmpi {

// A rank ended while others wait for it. XLA makes it a JaxRuntimeError; if the program does not
// handle it, the rank's monitor ends the job (jaxmpi/_job/monitor/monitor.py).
struct RankLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The smallest and the largest fingerprint of some ranks.
struct FingerprintRange {
  int64_t smallest, largest;
  bool equal() const { return smallest == largest; }
  FingerprintRange with(const FingerprintRange& other) const {
    return {std::min(smallest, other.smallest), std::max(largest, other.largest)};
  }
};

class Node {
 public:
  // The layout of the shared memory: a `RankState` for each rank, then the slots of each.
  struct Layout {
    int rank, size;      // this process, among `size` ranks that share the memory
    int64_t slot_bytes;  // room for one chunk of a rank
    int slots;           // of each rank
    bool crowded;        // whether there are more ranks than cores
    // The local rank of each, where they are a group within the node; empty for all ranks.
    std::vector<int> names;
    int64_t bytes() const;
  };

  // `memory` is `layout.bytes()` of zeros that all ranks of the node map from `file`. Each rank
  // holds a lock on the byte of its number in that file as long as it lives.
  Node(const Layout& layout, char* memory, int file);

  const Layout& layout() const { return layout_; }

  // Return the slot in which a rank has a chunk of this message.
  char* slot(int rank, int64_t chunk) const;

  // The steps of a message, each a function of the number of a chunk. All ranks lay a chunk out;
  // then each reduces its share; then each takes what the others have reduced. Between nodes,
  // `reduce` only begins the exchange of a chunk, and several chunks are in transit at once.
  struct Message {
    int64_t chunks;
    int64_t fingerprint;  // nothing is exchanged unless it is equal on all ranks
    // Without `take`, the ranks are done when they have reduced.
    std::function<void(int64_t)> lay_out, reduce, take;

    // Called once the fingerprints of all ranks are equal.
    std::function<void()> agreed = {};

    // The rest is for several nodes.

    // Called once the only chunk is laid out: sends what needs no other rank of the node.
    std::function<void()> send_ahead = {};
    // Called if the fingerprints differ.
    std::function<void()> give_up = {};
    // Called on the node's first rank: extends the range of this node's fingerprints to all nodes.
    std::function<FingerprintRange(FingerprintRange)> across_nodes = {};
    // Whether `across_nodes` also reduces the only chunk.
    bool at_once = false;
    // Moves the exchanges that `reduce` has begun forward; returns whether anything has moved.
    std::function<bool()> advance = {};
    // Whether the exchange of a chunk has ended.
    std::function<bool(int64_t)> is_reduced = {};
  };

  // Carry out a message, and return the range of the ranks' fingerprints. If it throws, this rank
  // can send nothing more.
  FingerprintRange exchange(const Message& message);

  // Tell the other ranks that this one can send nothing more.
  void fail();

  // Return the number of a chunk of this message, counted over all messages.
  int64_t sequence(int64_t chunk) const { return static_cast<int64_t>(chunks_) + chunk; }

  // Return the ranks of the node that have laid out fewer chunks than this one: it waits for them.
  // Any thread may call it.
  std::vector<int> missing_ranks() const;

  // Give up the lock that shows that this rank lives, because its program has ended and no message
  // of it will come. Those who wait for one find that the rank has ended.
  void leave();

  // Whether another rank has given up that lock, or has ended.
  bool is_gone(int rank) const;

  // When all ranks had laid out the first chunk of the last message, in ns of the steady clock.
  int64_t all_entered_ns() const { return all_entered_ns_; }

 private:
  struct RankState;
  RankState& state(int rank) const;
  using Counter = std::atomic<uint64_t> RankState::*;
  void wait(Counter counter, uint64_t value);  // until all other ranks have reached `value`
  void wait_for(int rank, Counter counter, uint64_t value);
  bool have(Counter counter, uint64_t value) const;  // whether all other ranks have reached it
  // Throw if a rank has not taken `end` chunks, and never will.
  void look_for_lost(uint64_t end) const;
  [[noreturn]] void throw_lost(int rank, bool gone) const;
  FingerprintRange pass(const Message& message);
  FingerprintRange agree(const Message& message);
  void pass_within(const Message& message);
  void pass_between(const Message& message);

  Layout layout_;
  char* memory_;
  int file_;
  uint64_t chunks_ = 0;    // of all messages before this one
  uint64_t messages_ = 0;  // before this one
  int64_t all_entered_ns_ = 0;
};

}  // namespace jaxmpi
