#include "within.h"

namespace jaxmpi {
namespace {

constexpr int64_t kLine = 64;  // bytes of a cache line
// Up to here it is faster if every rank reduces everything itself: that saves the wait for
// `reduced`.
constexpr int64_t kDirectBytes = 32768;
// From here on, a chunk may be written past the caches.
constexpr int64_t kLargeBytes = 65536;
constexpr int64_t kHotBytes = 8192;  // a block that stays in the L1 cache

// Return the rows that a slot has room for.
int64_t rows(const Operation& operation, int size) {
  return operation.kind == Kind::ReduceScatter || operation.kind == Kind::Alltoall ? size : 1;
}

}  // namespace

WithinNode::WithinNode(const Topology& topology, const Node& node, StorePolicy& policy,
                       const Operation& operation, std::vector<Array> arrays)
    : Call(topology, node, operation, std::move(arrays), rows(operation, topology.size)),
      store_policy_(policy) {
  for (const Chunk& chunk : chunks_) {
    large_of_.push_back(kCanStream && bytes(chunk) * rows_in() >= kLargeBytes ? large_++ : -1);
  }
  // All bytes of all ranks count: each rank reads them all.
  direct_ = operation_.kind == Kind::Allreduce && chunks_.size() == 1 &&
            bytes(chunks_[0]) * local_ <= kDirectBytes;
  if (direct_) owners_ = 0;  // so that each rank lays out the whole chunk
}

Node::Message WithinNode::message(int64_t fingerprint) {
  Node::Message message = {static_cast<int64_t>(chunks_.size()), fingerprint, {}, {}, {}};
  message.lay_out = timed(&WithinNode::write);
  if (operation_.kind != Kind::Allreduce && operation_.kind != Kind::ReduceScatter) {
    message.reduce = timed(&WithinNode::gather_all);
  } else if (direct_) {
    message.reduce = timed(&WithinNode::reduce_all);
  } else {
    message.reduce = timed(&WithinNode::reduce_share);
    message.take = timed(&WithinNode::take);
  }
  return message;
}

// Return a step that is timed, for the store policy, where the chunk is large.
std::function<void(int64_t)> WithinNode::timed(void (WithinNode::*step)(int64_t)) {
  return [this, step](int64_t k) {
    if (large_of_[k] < 0) return (this->*step)(k);
    store_policy_.time(large_of_[k], bytes(chunks_[k]), [=] { (this->*step)(k); });
  };
}

bool WithinNode::streams(int64_t k) const {
  return large_of_[k] >= 0 && store_policy_.streams(large_of_[k]);
}

// Lay out a chunk; of a broadcast, only the root has one.
void WithinNode::write(int64_t k) {
  const bool reads = operation_.kind != Kind::Bcast || operation_.source == topology_.rank;
  if (reads) lay_out(k, streams(k) ? stream_bytes : copy_bytes);
}

// Reduce the whole chunk into this rank's arrays.
void WithinNode::reduce_all(int64_t k) {
  const Chunk& chunk = chunks_[k];
  each(chunk, {0, count(chunk)}, [&](const Array& a, int64_t column, int64_t n, int64_t from) {
    reduce(a.type, operation_.op, sources(k, 0, from, at(k, me_, 0, from)), local_,
           operation_.divisor, a.out + column * chunk.stream->item, nullptr, n);
  });
}

// Reduce this rank's share of each row. An allreduce needs the result both in this rank's array and
// in its slot, from where the others take it. A reduce-scatter needs each row on one rank only.
void WithinNode::reduce_share(int64_t k) {
  const Chunk& chunk = chunks_[k];
  const Range mine = share(chunk, me_);
  if (me_ >= owners_ || mine.begin == mine.end) return;
  for (int64_t i = 0; i < rows_in(); ++i) {
    // Row `order[i]` is that of local rank i, which finds it in row i of the owner's slot.
    const int64_t row = rows_in() == 1 ? 0 : topology_.order[i];
    each(chunk, mine, [&](const Array& a, int64_t column, int64_t n, int64_t from) {
      const int64_t item = chunk.stream->item;
      const char* own = a.in + (row * a.pitch() + column) * item;
      char *out = a.out + column * item, *slot = at(k, me_, i, from);
      const bool own_result = rows_in() == 1 || i == me_,
                 others_result = rows_in() == 1 || i != me_;
      reduce_piece(k, row, from, own, own_result ? out : nullptr, others_result ? slot : nullptr,
                   n);
    });
  }
}

// Reduce n columns into `out`, into `slot`, or into both; one of them may be null.
void WithinNode::reduce_piece(int64_t k, int64_t row, int64_t from, const char* own, char* out,
                              char* slot, int64_t n) {
  const Type type = chunks_[k].stream->type;
  const int64_t item = size_of(type), hot = kHotBytes / item;
  if (!slot || !streams(k)) {
    return reduce(type, operation_.op, sources(k, row, from, own), local_, operation_.divisor,
                  out ? out : slot, out ? slot : nullptr, n);
  }
  // What goes to the slot past the caches is reduced block by block: a block is still in the L1
  // cache when it is streamed, and is read from memory only once.
  alignas(kLine) char block[kHotBytes];
  for (int64_t i = 0; i < n; i += hot) {
    const int64_t m = std::min(hot, n - i);
    char* reduced = out ? out + i * item : block;
    reduce(type, operation_.op, sources(k, row, from + i, own + i * item), local_,
           operation_.divisor, reduced, nullptr, m);
    stream_bytes(slot + i * item, reduced, m * item);
  }
}

// Copy what the other owners have reduced from their slots to this rank's arrays.
void WithinNode::take(int64_t k) {
  const Chunk& chunk = chunks_[k];
  const int64_t item = chunk.stream->item, row = operation_.kind == Kind::ReduceScatter ? me_ : 0;
  for (int owner = 0; owner < owners_; ++owner) {
    if (owner == me_) continue;
    each(chunk, share(chunk, owner), [&](const Array& a, int64_t column, int64_t n, int64_t from) {
      copy_bytes(a.out + column * item, at(k, owner, row, from), n * item);
    });
  }
}

}  // namespace jaxmpi
