// The collectives of a job: through shared memory within a node, and over MPI between nodes.
//
// The way of a call: XLA calls a handler (handlers.cc), which hands the arrays to the `Transport`
// of the group of ranks, at once or by a thread, in its turn (message_queue.h). That
// cuts them into chunks (call.h) and takes these through the steps of a message (node.h): within a
// node by within.h, and between nodes by between.h.
#pragma once

#include <memory>
#include <stdexcept>
#include <vector>

#include "between.h"
#include "call.h"
#include "node.h"
#include "store_policy.h"
#include "worker_threads.h"

namespace jaxmpi {

// The fingerprints of the ranks differ. The shared memory is as before, and the ranks may go on.
struct CollectiveMismatch : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// It carries one message at a time: who calls it has the turn of a message queue.
class Transport {
 public:
  // `nodes` are the same ranks of this node, once for each thread of a rank: each carries a part of
  // a large message.
  Transport(const Topology& topology, std::vector<std::unique_ptr<Node>> nodes);

  // Connect this rank to the other nodes, if there are several.
  void connect(std::unique_ptr<Network> network, const Tuning& tuning);

  // Carry out a collective on all arrays. The ranks compare `fingerprint`; if it differs, all of
  // them throw CollectiveMismatch.
  void run(const Operation& operation, int64_t fingerprint, std::vector<Array> arrays);

  int size() const { return topology_.size; }
  int rank() const { return topology_.rank; }

  // Return the ranks on this node for which this one waits. Any thread may call it.
  std::vector<int> missing_ranks() const;

  // Whether another rank of this node has ended, or has left. Any thread may call it.
  bool has_ended(int rank) const;

  // Let the other ranks of this node know that no message of this rank will come.
  void leave();

  // When all ranks had entered the last message, in nanoseconds of the steady clock.
  int64_t all_entered_ns() const { return stripes_.front().node->all_entered_ns(); }

  // Compare a fingerprint, and exchange nothing else.
  FingerprintRange compare(int64_t fingerprint);

 private:
  // What one thread of a rank carries a part of a message with.
  struct Stripe {
    std::unique_ptr<Node> node;
    StorePolicy store_policy;
  };
  FingerprintRange within(const Operation& operation, int64_t fingerprint,
                          std::vector<Array> arrays);
  FingerprintRange carry(Stripe& stripe, const Operation& operation, int64_t fingerprint,
                         std::vector<Array> arrays, std::function<void()> agreed = {});

  Topology topology_;
  std::vector<Stripe> stripes_;         // at least one
  std::unique_ptr<Channels> channels_;  // between nodes
  WorkerThreads workers_;               // for all stripes but the first
};

}  // namespace jaxmpi
