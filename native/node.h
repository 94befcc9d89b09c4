// The ranks of one node: how they pass arrays to each other through shared memory.
//
// All messages of all ranks are one sequence of chunks, counted from the beginning. Each rank has a
// few slots, which its chunks take in turn, and three counters, which only it writes:
//
//   laid_out  its part of so many chunks is in its slots
//   reduced   its share of so many chunks is reduced, and in its slots for the others
//   taken     it needs nothing of so many chunks any more
//
// Before it lays out a chunk, a rank waits until all have taken what was in that slot before;
// before it reduces, until all have laid out; before it takes, until all have reduced. A rank lays
// out the next chunk before it reduces this one, and takes the one before after that, so it seldom
// waits.
//
// With the first chunk of a message goes its word. No rank is more than one message ahead of
// another, as it waits for the first chunks of all: two words of each rank are enough. Where the
// words differ, every rank leaves the message after its first chunk, and all counters are equal
// again.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "clock.h"

namespace jaxmpi {

// A rank that ended while others wait for it.
struct RankLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Extremes {
  int64_t smallest, largest;
};

class Node {
 public:
  // Layout of the shared memory: for each rank a `Post`, then its slots.
  struct Layout {
    int rank, size;          // of this process among the ranks of the node
    int64_t slot_bytes;      // what a rank can lay out at once
    int slots;               // how many times
    bool crowded;            // more ranks than cores
    std::vector<int> names;  // the local rank of each, where these are a part of those of the node;
                             // empty otherwise
    int64_t bytes() const;
  };

  // memory: `layout.bytes()` of zeros that all ranks of the node map. file: where it is from; each
  // rank holds a lock on the byte of its number as long as it lives.
  Node(const Layout& layout, char* memory, int file);

  const Layout& layout() const { return layout_; }

  // The memory for one chunk of this message, of any rank.
  char* slot(int rank, int64_t chunk) const;

  // What a message does with each chunk, by its number. All ranks lay it out; then each reduces its
  // share; then each takes what the others have reduced. Between nodes, to reduce takes long: it is
  // begun, and several chunks are on their way at once.
  struct Message {
    int64_t chunks;
    int64_t word;  // equal on all ranks, or nothing is exchanged
    std::function<void(int64_t)> lay_out, reduce,
        take;  // without `take`, the ranks are done when they have reduced
    // Of several nodes, once the only chunk is laid out: sends what needs no other rank of the
    // node; and if the words differ.
    std::function<void()> send_ahead = {}, give_up = {};
    // Called on the node's first rank of several nodes: makes the extremes of this node those of
    // all nodes.
    std::function<Extremes(Extremes)> everywhere = {};
    // Of several nodes: moves on what `reduce` has begun, and returns whether something has moved;
    // whether a chunk is done.
    std::function<bool()> advance = {};
    std::function<bool(int64_t)> is_reduced = {};
    std::function<void()> agreed = {};  // called once the words of all ranks are equal
    bool at_once = false;               // whether `everywhere` also reduces the only chunk
  };

  // Returns the extremes of the ranks' words. If it throws, this rank can send nothing more.
  Extremes exchange(const Message& message);

  // This rank can send nothing more.
  void fail();

  // The number of a chunk of this message, counted from the beginning.
  int64_t sequence(int64_t chunk) const { return static_cast<int64_t>(chunks_) + chunk; }

  // When all had laid out the first chunk of the last message.
  int64_t met() const { return met_; }

 private:
  struct Post;
  Post& post(int rank) const;
  using Counter = std::atomic<uint64_t> Post::*;
  void wait(Counter counter, uint64_t value);  // for all others
  void wait_for(int rank, Counter counter, uint64_t value);
  bool have(Counter counter, uint64_t value) const;  // all others
  void look_for_lost(
      uint64_t end) const;  // throws if a rank has not taken so many chunks, and will not
  bool is_gone(int rank) const;
  [[noreturn]] void throw_lost(int rank, bool gone) const;
  Extremes pass(const Message& message);
  Extremes agree(const Message& message);
  void pass_within(const Message& message);
  void pass_between(const Message& message);

  Layout layout_;
  char* memory_;
  int file_;
  uint64_t chunks_ = 0;  // of all messages before this one
  uint64_t messages_ = 0;
  int64_t met_ = 0;
};

}  // namespace jaxmpi
