#include "transport.h"

#include <utility>

#include "within.h"

namespace jaxmpi {

Transport::Transport(const Place& place, std::unique_ptr<Node> node) : place_(place), node_(std::move(node)) {}

void Transport::connect(std::unique_ptr<Network> network, const Tuning& tuning) {
  lanes_ = std::make_unique<Lanes>(std::move(network), tuning, node_->layout().slots);
}

Extremes Transport::meet(int64_t word) {
  const Operation nothing = {Kind::Allreduce, Op::Sum, 1, -1, -1};
  if (lanes_) return node_->exchange(BetweenNodes(place_, *node_, *lanes_, nothing, {}).message(word));
  return node_->exchange({0, word, {}, {}, {}});
}

void Transport::run(const Operation& operation, int64_t word, std::vector<Array> arrays) {
  Extremes words;
  if (lanes_) {
    BetweenNodes call(place_, *node_, *lanes_, operation, std::move(arrays));
    words = node_->exchange(call.message(word));
  } else {
    WithinNode call(place_, *node_, stores_, operation, std::move(arrays));
    words = node_->exchange(call.message(word));
    if (words.smallest == words.largest) call.end();
  }
  if (words.smallest != words.largest) throw Disagreement("the ranks do not do the same");
}

}  // namespace jaxmpi
