// The ranks of several nodes: how those who stand for their nodes talk to each other, over MPI.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "node.h"
#include "reduce.h"

namespace jaxmpi {

// The MPI functions and handles that are needed, from the library that runs: nothing here is compiled against an MPI. Handles
// are pointers in some MPIs and ints in others; both travel in a register of 64 bits.
class Nodes {
 public:
  using Handle = intptr_t;

  struct Handles {
    Handle comm;             // one rank of each node
    Handle bytes[5];         // datatypes of 1, 2, 4, 8 and 16 bytes
    Handle int64, max;       // for words
    std::vector<int> ranks;  // how many ranks each node has, in the order of `comm`
  };

  // library: the path of libmpi.
  Nodes(const std::string& library, const Handles& handles, int node);

  Extremes extremes(Extremes mine) const;

  // to = from of all nodes, reduced; of `wide(type)`.
  void allreduce(Type type, Op op, const void* from, void* to, int64_t n) const;

  // from: a row of n for each rank of each node. to: those of this node's ranks, reduced over the nodes.
  void reduce_scatter(Type type, Op op, const void* from, void* to, int64_t n) const;

  // from: a row of n bytes for each rank of this node. to: those of all nodes.
  void allgather(const void* from, void* to, int64_t n) const;

 private:
  Handle datatype(Type type) const;
  Handle operation(Type type, Op op) const;
  void check(int code, const char* function) const;

  struct Functions;
  static Functions& functions();
  Handles handles_;
  int node_;
};

}  // namespace jaxmpi
