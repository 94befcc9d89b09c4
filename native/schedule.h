// Which nodes send which blocks to each other: a plan that follows from the number of nodes alone.
//
// The data of a collective is divided into blocks, one for each node. Blocks are counted relative
// to the node: block i of node r belongs to node (r + i) mod p, so every node has the same schedule
// with other peers. A schedule is a list of rounds. The sends of a round need what the rounds
// before have received; its receives can be posted at once.
//
// Between few nodes, a block goes straight to where it is needed: one round of p - 1 transfers.
// Between many, the rounds are those of the circulant graph (Träff, "Optimal, non-pipelined
// reduce-scatter and allreduce algorithms", 2024): ceil(log2 p) rounds of one transfer each, for
// any p. Both send p - 1 blocks, the least that is possible.
#pragma once

#include <cstdint>
#include <vector>

namespace jaxmpi {

struct Transfer {
  int to, from;                    // nodes; -1: none
  int send_begin, send_end;        // blocks
  int receive_begin, receive_end;  // blocks
  bool reduces;  // whether what arrives is combined with what is there, or replaces it
};
using Round = std::vector<Transfer>;
using Schedule = std::vector<Round>;

// A reduce-scatter: at the end, block 0 is reduced over all nodes.
Schedule reduce_scatter_schedule(int nodes, int node, bool direct);

// An allgather: from block 0 of each node to all blocks on every node.
Schedule allgather_schedule(int nodes, int node, bool direct);

// An allreduce of small messages, with all blocks as one: ceil(log2 p) rounds, or two more where p
// is no power of two.
Schedule recursive_doubling_schedule(int nodes, int node);

// A broadcast from the root along a binomial tree, with all blocks as one.
Schedule broadcast_schedule(int nodes, int node, int root);

}  // namespace jaxmpi
