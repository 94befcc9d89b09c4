#include "within.h"

namespace jaxmpi {
namespace {

constexpr int64_t kLine = 64;  // bytes, of the caches
constexpr int64_t kDirectBytes =
    32768;  // up to here it is quicker if every rank reduces everything itself
constexpr int64_t kLargeBytes =
    65536;  // from here on, what is laid out of a chunk may be written past the caches
constexpr int64_t kHotBytes = 8192;  // what has just been reduced is still in the L1 cache

int64_t rows(const Operation& operation, int size) {
  return operation.kind == Kind::ReduceScatter || operation.kind == Kind::Alltoall ? size : 1;
}

}  // namespace

WithinNode::WithinNode(const Place& place, const Node& node, Stores& stores,
                       const Operation& operation, std::vector<Array> arrays)
    : Call(place, node, operation, std::move(arrays), rows(operation, place.size)),
      stores_(stores) {
  for (const Chunk& chunk : chunks_) {
    large_of_.push_back(kCanStream && bytes(chunk) * rows_in() >= kLargeBytes ? large_++ : -1);
  }
  direct_ = operation_.kind == Kind::Allreduce && chunks_.size() == 1 &&
            bytes(chunks_[0]) * local_ <= kDirectBytes;
  if (direct_) owners_ = 0;
}

Node::Message WithinNode::message(int64_t word) {
  Node::Message message = {static_cast<int64_t>(chunks_.size()), word, {}, {}, {}};
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

// A step of the message, by the number of the chunk.
std::function<void(int64_t)> WithinNode::timed(void (WithinNode::*step)(int64_t)) {
  return [this, step](int64_t k) {
    if (large_of_[k] < 0) return (this->*step)(k);
    stores_.time(large_of_[k], bytes(chunks_[k]), [=] { (this->*step)(k); });
  };
}

bool WithinNode::streams(int64_t k) const {
  return large_of_[k] >= 0 && stores_.streams(large_of_[k]);
}

void WithinNode::write(int64_t k) {
  const bool reads = operation_.kind != Kind::Bcast || operation_.source == at_.rank;
  if (reads) lay_out(k, streams(k) ? stream_bytes : copy_bytes);
}

void WithinNode::reduce_all(int64_t k) {
  const Chunk& chunk = chunks_[k];
  each(chunk, {0, count(chunk)}, [&](const Array& a, int64_t column, int64_t n, int64_t from) {
    reduce(a.type, operation_.op, sources(k, 0, from, at(k, me_, 0, from)), local_,
           operation_.divisor, a.out + column * chunk.stream->item, nullptr, n);
  });
}

void WithinNode::reduce_share(int64_t k) {
  const Chunk& chunk = chunks_[k];
  const Range mine = share(chunk, me_);
  if (me_ >= owners_ || mine.begin == mine.end) return;
  for (int64_t i = 0; i < rows_in(); ++i) {
    const int64_t row = rows_in() == 1 ? 0 : at_.order[i];
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

// To one of `out` and `slot`, or to both.
void WithinNode::reduce_piece(int64_t k, int64_t row, int64_t from, const char* own, char* out,
                              char* slot, int64_t n) {
  const Type type = chunks_[k].stream->type;
  const int64_t item = size_of(type), hot = kHotBytes / item;
  if (!slot || !streams(k)) {
    return reduce(type, operation_.op, sources(k, row, from, own), local_, operation_.divisor,
                  out ? out : slot, out ? slot : nullptr, n);
  }
  alignas(kLine) char block[kHotBytes];
  for (int64_t i = 0; i < n; i += hot) {
    const int64_t m = std::min(hot, n - i);
    char* reduced = out ? out + i * item : block;
    reduce(type, operation_.op, sources(k, row, from + i, own + i * item), local_,
           operation_.divisor, reduced, nullptr, m);
    stream_bytes(slot + i * item, reduced, m * item);
  }
}

// What the other owners have reduced, from their slots.
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
