#include "transport.h"

#include <utility>

#include "within.h"

namespace jaxmpi {
namespace {

constexpr int64_t kLine = 64;               // bytes: parts begin on cache lines
constexpr int64_t kStripedBytes = 1 << 20;  // from this size on, several threads are faster

// One of `count` parts of about as many bytes, which together have all columns.
std::vector<Array> part_of(const std::vector<Array>& arrays, int64_t part, int64_t count) {
  auto lines_of = [](const Array& array) { return (array.bytes() + kLine - 1) / kLine; };
  int64_t lines = 0;
  for (const Array& array : arrays) lines += lines_of(array);
  const int64_t begin = lines * part / count, end = lines * (part + 1) / count;
  std::vector<Array> parts;
  int64_t before = 0;  // lines of the arrays so far
  for (const Array& array : arrays) {
    const int64_t item = size_of(array.type), here = lines_of(array);
    const int64_t first = std::clamp<int64_t>(begin - before, 0, here) * (kLine / item);
    const int64_t last =
        std::min(array.columns, std::clamp<int64_t>(end - before, 0, here) * (kLine / item));
    if (first < last) {
      parts.push_back({array.type, array.in + first * item, array.out + first * item, last - first,
                       array.pitch()});
    }
    before += here;
  }
  return parts;
}

}  // namespace

Transport::Transport(const Place& place, std::vector<std::unique_ptr<Node>> nodes)
    : place_(place), workers_(static_cast<int>(nodes.size()) - 1) {
  for (auto& node : nodes) stripes_.push_back({std::move(node), {}});
}

void Transport::connect(std::unique_ptr<Network> network, const Tuning& tuning) {
  lanes_ =
      std::make_unique<Lanes>(std::move(network), tuning, stripes_.front().node->layout().slots);
}

Extremes Transport::meet(int64_t word) {
  const Operation nothing = {Kind::Allreduce, Op::Sum, 1, -1, -1};
  Node& node = *stripes_.front().node;
  if (lanes_) return node.exchange(BetweenNodes(place_, node, *lanes_, nothing, {}).message(word));
  return node.exchange({0, word, {}, {}, {}});
}

void Transport::run(const Operation& operation, int64_t word, std::vector<Array> arrays) {
  Extremes words;
  if (lanes_) {
    Node& node = *stripes_.front().node;
    BetweenNodes call(place_, node, *lanes_, operation, std::move(arrays));
    words = node.exchange(call.message(word));
  } else {
    words = within(operation, word, std::move(arrays));
  }
  if (words.smallest != words.largest) throw Disagreement("the ranks do not do the same");
}

// The other stripes begin once the ranks have agreed in the first. What fails in one of them must
// fail in all: the other ranks would wait.
Extremes Transport::within(const Operation& operation, int64_t word, std::vector<Array> arrays) {
  const int count = workers_.count() + 1;
  if (count == 1 || bytes_of(arrays) < kStripedBytes)
    return carry(stripes_.front(), operation, word, std::move(arrays));
  workers_.check();
  bool begun = false;
  std::exception_ptr failure;
  Extremes words = {};
  auto begin = [&] {
    begun = true;
    workers_.start([&](int k) {
      Stripe& stripe = stripes_[static_cast<size_t>(k)];
      try {
        carry(stripe, operation, word, part_of(arrays, k, count));
      } catch (...) {
        stripe.node->fail();
        throw;
      }
    });
  };
  try {
    words = carry(stripes_.front(), operation, word, part_of(arrays, 0, count), begin);
  } catch (...) {
    failure = std::current_exception();
  }
  try {
    if (begun) workers_.wait();
  } catch (...) {
    if (!failure) failure = std::current_exception();
  }
  if (!failure) return words;
  for (Stripe& stripe : stripes_) stripe.node->fail();
  std::rethrow_exception(failure);
}

Extremes Transport::carry(Stripe& stripe, const Operation& operation, int64_t word,
                          std::vector<Array> arrays, std::function<void()> agreed) {
  WithinNode call(place_, *stripe.node, stripe.stores, operation, std::move(arrays));
  Node::Message message = call.message(word);
  message.agreed = std::move(agreed);
  const Extremes words = stripe.node->exchange(message);
  if (words.smallest == words.largest) call.end();
  return words;
}

}  // namespace jaxmpi
