#include "transport.h"

#include <algorithm>
#include <utility>

#include "within.h"

namespace jaxmpi {
namespace {

constexpr int64_t kLine = 64;               // bytes: parts begin on cache lines
constexpr int64_t kStripedBytes = 1 << 20;  // from this size on, several threads are faster

// Return one of `count` parts of about equal bytes. Together they have all columns of all arrays.
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

Transport::Transport(const Topology& topology, std::vector<std::unique_ptr<Node>> nodes)
    : topology_(topology), workers_(static_cast<int>(nodes.size()) - 1) {
  for (auto& node : nodes) stripes_.push_back({std::move(node), {}});
}

void Transport::connect(std::unique_ptr<Network> network, const Tuning& tuning) {
  channels_ =
      std::make_unique<Channels>(std::move(network), tuning, stripes_.front().node->layout().slots);
}

std::vector<int> Transport::missing_ranks() const {
  std::vector<int> ranks;
  for (int local : stripes_.front().node->missing_ranks())
    ranks.push_back(topology_.order[topology_.firsts[topology_.node] + local]);
  return ranks;
}

bool Transport::has_ended(int rank) const {
  const Node& node = *stripes_.front().node;
  const auto here = topology_.order.begin() + topology_.firsts[topology_.node];
  const auto end = here + node.layout().size;
  const auto found = std::find(here, end, rank);
  return rank != topology_.rank && found != end && node.is_gone(static_cast<int>(found - here));
}

void Transport::leave() {
  for (Stripe& stripe : stripes_) stripe.node->leave();
}

FingerprintRange Transport::compare(int64_t fingerprint) {
  const Operation nothing = {Kind::Allreduce, Op::Sum, 1, -1, -1};
  Node& node = *stripes_.front().node;
  if (channels_)
    return node.exchange(
        BetweenNodes(topology_, node, *channels_, nothing, {}).message(fingerprint));
  return node.exchange({0, fingerprint, {}, {}, {}});
}

void Transport::run(const Operation& operation, int64_t fingerprint, std::vector<Array> arrays) {
  FingerprintRange range;
  if (channels_) {
    Node& node = *stripes_.front().node;
    BetweenNodes call(topology_, node, *channels_, operation, std::move(arrays));
    range = node.exchange(call.message(fingerprint));
  } else {
    range = within(operation, fingerprint, std::move(arrays));
  }
  if (!range.equal()) throw CollectiveMismatch("collective mismatch between ranks");
}

// Carry out a message within one node, a large one by all threads of the rank.
FingerprintRange Transport::within(const Operation& operation, int64_t fingerprint,
                                   std::vector<Array> arrays) {
  const int count = workers_.count() + 1;
  if (count == 1 || bytes_of(arrays) < kStripedBytes)
    return carry(stripes_.front(), operation, fingerprint, std::move(arrays));
  workers_.check();
  bool begun = false;
  std::exception_ptr failure;
  FingerprintRange range = {};
  // The other stripes begin once the ranks have agreed in the first: on a mismatch none of them has
  // begun, and their counters stay equal on all ranks.
  auto begin = [&] {
    begun = true;
    workers_.start([&](int k) {
      Stripe& stripe = stripes_[static_cast<size_t>(k)];
      try {
        carry(stripe, operation, fingerprint, part_of(arrays, k, count));
      } catch (...) {
        // The same stripe of the other ranks would wait for this one.
        stripe.node->fail();
        throw;
      }
    });
  };
  try {
    range = carry(stripes_.front(), operation, fingerprint, part_of(arrays, 0, count), begin);
  } catch (...) {
    failure = std::current_exception();
  }
  try {
    if (begun) workers_.wait();
  } catch (...) {
    if (!failure) failure = std::current_exception();
  }
  if (!failure) return range;
  // A message that failed in one stripe has failed in all: what the others brought is of no use.
  for (Stripe& stripe : stripes_) stripe.node->fail();
  std::rethrow_exception(failure);
}

FingerprintRange Transport::carry(Stripe& stripe, const Operation& operation, int64_t fingerprint,
                                  std::vector<Array> arrays, std::function<void()> agreed) {
  WithinNode call(topology_, *stripe.node, stripe.store_policy, operation, std::move(arrays));
  Node::Message message = call.message(fingerprint);
  message.agreed = std::move(agreed);
  const FingerprintRange range = stripe.node->exchange(message);
  if (range.equal()) call.end();
  return range;
}

}  // namespace jaxmpi
