// Who sends what to whom between the nodes: pure planning, the same on every rank.
//
// What a collective works on is divided into blocks, one for each node. Blocks are counted from the
// node's own: block i of node r is that of node (r + i) mod p, so every node has the same schedule
// but for the names of its peers. A schedule is a list of rounds. The sends of a round need what
// the rounds before have received; its receives can be posted at once.
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
  int to, from;                    // nodes; -1: nobody
  int send_begin, send_end;        // blocks
  int receive_begin, receive_end;  // blocks: where what arrives belongs
  bool reduces;  // whether what arrives is combined with what is there, or takes its place
};
using Round = std::vector<Transfer>;
using Schedule = std::vector<Round>;

// At the end, block 0 is reduced over all nodes.
Schedule reduce_scatter_schedule(int nodes, int node, bool direct);

// From block 0 of each node to all blocks on every node.
Schedule allgather_schedule(int nodes, int node, bool direct);

// For small messages: all blocks as one, reduced on every node in ceil(log2 p) rounds, or two more
// where p is no power of two.
Schedule recursive_doubling_schedule(int nodes, int node);

// From the root to all nodes, all blocks as one, along a binomial tree.
Schedule broadcast_schedule(int nodes, int node, int root);

}  // namespace jaxmpi
