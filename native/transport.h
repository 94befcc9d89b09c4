// The collectives of a job: through shared memory within a node, and over MPI between nodes.
#pragma once

#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "between.h"
#include "call.h"
#include "node.h"
#include "store_policy.h"
#include "worker_threads.h"

namespace jaxmpi {

// The ranks are about to do different things. The shared memory is as before: they may go on.
struct Disagreement : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Transport {
 public:
  // nodes: the same ranks of this node, several times: each carries a part of a large message, by a
  // thread of its own.
  Transport(const Place& place, std::vector<std::unique_ptr<Node>> nodes);

  // To the other nodes, if there are several.
  void connect(std::unique_ptr<Network> network, const Tuning& tuning);

  // Carry out a collective on all arrays. The ranks compare `word`. Throws Disagreement on all of
  // them if it differs.
  void run(const Operation& operation, int64_t word, std::vector<Array> arrays);

  int size() const { return place_.size; }
  int rank() const { return place_.rank; }

  // When all ranks had entered the last message.
  int64_t met() const { return stripes_.front().node->met(); }

  // Only compare.
  Extremes meet(int64_t word);

  std::mutex one_at_a_time;  // keeps the messages of two threads apart

 private:
  // A part of the columns of a message, and what carries it.
  struct Stripe {
    std::unique_ptr<Node> node;
    Stores stores;
  };
  Extremes within(const Operation& operation, int64_t word, std::vector<Array> arrays);
  Extremes carry(Stripe& stripe, const Operation& operation, int64_t word,
                 std::vector<Array> arrays, std::function<void()> agreed = {});

  Place place_;
  std::vector<Stripe> stripes_;   // at least one
  std::unique_ptr<Lanes> lanes_;  // between nodes
  WorkerThreads workers_;         // for all stripes but the first
};

}  // namespace jaxmpi
