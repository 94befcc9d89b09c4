// A collective of ranks that are all on one node.
#pragma once

#include "call.h"
#include "store_policy.h"

namespace jaxmpi {

class WithinNode : public Call {
 public:
  WithinNode(const Topology& topology, const Node& node, StorePolicy& policy,
             const Operation& operation, std::vector<Array> arrays);

  Node::Message message(int64_t fingerprint);

  // Tell the store policy that the message is over.
  void end() { store_policy_.end(large_); }

 private:
  std::function<void(int64_t)> timed(void (WithinNode::*step)(int64_t));
  bool streams(int64_t k) const;  // whether a chunk is written past the caches
  void write(int64_t k);
  void gather_all(int64_t k) { gather(k); }
  void reduce_all(int64_t k);
  void reduce_share(int64_t k);
  void reduce_piece(int64_t k, int64_t row, int64_t from, const char* own, char* out, char* slot,
                    int64_t n);
  void take(int64_t k);

  StorePolicy& store_policy_;
  bool direct_;                    // whether every rank reduces everything itself
  int64_t large_ = 0;              // how many chunks are large
  std::vector<int64_t> large_of_;  // each chunk's number among the large ones of the message, or -1
};

}  // namespace jaxmpi
