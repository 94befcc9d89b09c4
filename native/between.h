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

// Which algorithm is taken between nodes.
struct Tuning {
  int64_t small_bytes;  // up to here, an allreduce, alltoall or permute is sent together with the
                        // word of the message
  int direct_nodes;     // up to so many, blocks go straight to where they are needed
};

// What the chunks that are on their way need: as many as there are slots. Memory is allocated when
// it is first needed.
class Lanes {
 public:
  struct Lane {
    Exchange exchange;
    bool done = true;
    // What this node has of it; the same in float32, for short floats; what other nodes sent; what
    // is reduced.
    std::vector<char> partial, totals, arrived, reduced;
  };

  Lanes(std::unique_ptr<Network> network, const Tuning& tuning, int slots)
      : network(std::move(network)), tuning(tuning), lanes_(slots) {}

  Lane& operator[](int64_t sequence) { return lanes_[sequence % lanes_.size()]; }

  const std::unique_ptr<Network> network;
  const Tuning tuning;
  std::vector<char> mine, theirs;  // of the first message
  int64_t disagreements = 0;       // so far

 private:
  std::vector<Lane> lanes_;
};

class BetweenNodes : public Call {
 public:
  BetweenNodes(const Place& place, const Node& node, Lanes& lanes, const Operation& operation,
               std::vector<Array> arrays);

  Node::Message message(int64_t word);

 private:
  using Lane = Lanes::Lane;
  using Stages = std::vector<Exchange::Stage>;

  Extremes agree(Extremes words);
  void merge(const Transfer& transfer, int64_t wide_bytes);
  void finish_small();

  void write(int64_t k);
  void begin(int64_t k);
  bool advance();
  void take(int64_t k);

  void begin_pair(int64_t k, Lane& lane);
  void begin_reduce(int64_t k, Lane& lane);
  void begin_allgather(int64_t k, Lane& lane);
  void begin_bcast(int64_t k, Lane& lane);
  void begin_rows(int64_t k, Lane& lane);
  std::vector<Exchange::Move> rows_between(int64_t k);
  void exchange(int64_t k, Lane& lane, Stages stages, std::function<void()> end);
  void add_direct(Stages& stages, Lane& lane, Type type, const std::vector<int64_t>& starts);
  void add_rounds(Stages& stages, Lane& lane, Type type, const std::vector<int64_t>& starts);
  void add_allgather(Stages& stages, char* blocks, int64_t item,
                     const std::vector<int64_t>& starts);

  bool moves() const {
    return operation_.kind == Kind::Alltoall || operation_.kind == Kind::Permute;
  }
  bool reduces() const {
    return operation_.kind == Kind::Allreduce || operation_.kind == Kind::ReduceScatter;
  }
  bool pairs() const { return nodes_ == 2 && direct_ && operation_.kind == Kind::Allreduce; }
  Lane& lane(int64_t k) const { return lanes_[node_.sequence(k)]; }
  int tag(int64_t k) const;
  int peer(int node) const {
    return at_.order[at_.firsts[node] + me_];
  }  // the owner there that has the same share
  std::vector<int64_t> starts(int64_t n) const;
  void partial(int64_t k, Range part, int64_t row, char* to);
  void take_from(int64_t k, int owner);

  Lanes& lanes_;
  int nodes_, root_node_ = -1, root_local_ = -1;
  bool alone_;   // whether each node has one rank
  bool direct_;  // whether blocks go straight to where they are needed
  bool at_once_ = false;
  bool ahead_ = false;          // whether the only chunk is sent before the ranks have agreed
  int before_ = 1, after_ = 1;  // by what to divide: what is sent, and what is reduced
  int64_t begun_ = 0, advanced_ = 0;
};

}  // namespace jaxmpi
