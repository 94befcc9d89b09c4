// The collectives of a job: through shared memory within a node, and over MPI between nodes.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "internode.h"
#include "node.h"
#include "reduce.h"
#include "store_policy.h"

namespace jaxmpi {

// The ranks are about to do different things. The shared memory is as before: they may go on.
struct Disagreement : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// By position, as in jaxmpi/_backends/native.py.
enum class Kind : uint8_t { Allreduce, ReduceScatter, Allgather };

// One array of a call, as a matrix of `columns`: `in` has a row for each rank in a reduce-scatter, and `out` in an allgather;
// one row otherwise. The two may be the same memory.
struct Array {
  Type type;
  const char* in;
  char* out;
  int64_t columns;
};

class Transport {
 public:
  struct Place {
    int rank, size;          // in the job
    std::vector<int> order;  // of the ranks: by node, and by local rank within
    int owners;              // how many ranks of each node reduce
  };

  Transport(const Place& place, std::unique_ptr<Node> node);

  // To the other nodes: for the owners of a node, which are among its ranks if there are several nodes.
  void connect(std::unique_ptr<Nodes> nodes) { nodes_ = std::move(nodes); }

  // Carry out a collective on all arrays. The ranks compare `word`. Throws Disagreement on all of them if it differs.
  void run(Kind kind, Op op, int divisor, int64_t word, std::vector<Array> arrays);

  int size() const { return place_.size; }

  // When all ranks of this node had entered the last message.
  int64_t met() const { return node_->met(); }

  // Only compare.
  Extremes meet(int64_t word);

 private:
  class Stream;
  class Call;
  Extremes exchange(const Node::Message& message);

  Place place_;
  std::unique_ptr<Node> node_;
  std::unique_ptr<Nodes> nodes_;
  Stores stores_;
  bool several_;                       // nodes
  std::vector<char> partial_, total_;  // of one chunk, between nodes
};

}  // namespace jaxmpi
