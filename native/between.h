// A collective of ranks on several nodes: within each through shared memory, and between them by
// MPI's messages.
#pragma once

#include <memory>
#include <vector>

#include "call.h"
#include "exchange.h"
#include "internode.h"
#include "schedule.h"

namespace jaxmpi {

// Thresholds between the algorithms. They decide in which order sums are formed, and so the bits.
struct Tuning {
  // Up to here, an allreduce, alltoall or permute is sent together with the fingerprint.
  int64_t small_bytes;
  int direct_nodes;  // up to so many nodes, blocks go straight to where they are needed
};

// One channel for each chunk that can be in transit: as many as there are slots. Memory is
// allocated when it is first needed.
class Channels {
 public:
  struct Channel {
    Exchange exchange;
    bool done = true;
    std::vector<char> partial;  // what this node has of the chunk
    std::vector<char> totals;   // the sums so far in float32, of short floats
    std::vector<char> arrived;  // what other nodes sent
    std::vector<char> reduced;
  };

  Channels(std::unique_ptr<Network> network, const Tuning& tuning, int slots)
      : network(std::move(network)), tuning(tuning), channels_(slots) {}

  Channel& operator[](int64_t sequence) { return channels_[sequence % channels_.size()]; }

  const std::unique_ptr<Network> network;
  const Tuning tuning;
  std::vector<char> mine, theirs;  // messages of `agree`: a range of fingerprints, then the arrays
  int64_t mismatches = 0;          // so far

 private:
  std::vector<Channel> channels_;
};

class BetweenNodes : public Call {
 public:
  BetweenNodes(const Topology& topology, const Node& node, Channels& channels,
               const Operation& operation, std::vector<Array> arrays);

  Node::Message message(int64_t fingerprint);

 private:
  using Channel = Channels::Channel;
  using Stages = std::vector<Exchange::Stage>;

  FingerprintRange agree(FingerprintRange range);
  void merge(const Transfer& transfer, int64_t wide_bytes);
  void finish_small();

  void write(int64_t k);
  void begin(int64_t k);
  bool advance();
  void take(int64_t k);

  void begin_pair(int64_t k, Channel& channel);
  void begin_reduce(int64_t k, Channel& channel);
  void begin_allgather(int64_t k, Channel& channel);
  void begin_bcast(int64_t k, Channel& channel);
  void begin_rows(int64_t k, Channel& channel);
  std::vector<Exchange::Move> rows_between(int64_t k);
  void exchange(int64_t k, Channel& channel, Stages stages, std::function<void()> end);
  void add_direct(Stages& stages, Channel& channel, Type type, const std::vector<int64_t>& starts);
  void add_rounds(Stages& stages, Channel& channel, Type type, const std::vector<int64_t>& starts);
  void add_allgather(Stages& stages, char* blocks, int64_t item,
                     const std::vector<int64_t>& starts);

  bool moves() const {
    return operation_.kind == Kind::Alltoall || operation_.kind == Kind::Permute;
  }
  bool reduces() const {
    return operation_.kind == Kind::Allreduce || operation_.kind == Kind::ReduceScatter;
  }
  bool pairs() const { return nodes_ == 2 && direct_ && operation_.kind == Kind::Allreduce; }
  Channel& channel(int64_t k) const { return channels_[node_.sequence(k)]; }
  int tag(int64_t k) const;
  // The owner of the same share on another node.
  int peer(int node) const { return topology_.order[topology_.firsts[node] + me_]; }
  std::vector<int64_t> starts(int64_t n) const;
  void partial(int64_t k, Range part, int64_t row, char* to);
  void take_from(int64_t k, int owner);

  Channels& channels_;
  int nodes_, root_node_ = -1, root_local_ = -1;
  bool alone_;                  // whether each node has one rank
  bool direct_;                 // whether blocks go straight to where they are needed
  bool at_once_ = false;        // whether the only chunk is reduced with the fingerprints
  bool ahead_ = false;          // whether the only chunk is sent before the ranks have agreed
  int before_ = 1, after_ = 1;  // by what to divide: what is sent, and what is reduced
  int64_t begun_ = 0, advanced_ = 0;
};

}  // namespace jaxmpi
