#include "transport.h"

#include <algorithm>
#include <utility>

namespace jaxmpi {
namespace {

constexpr int64_t kLine = 64;            // bytes: shares of a chunk begin on cache lines
constexpr int64_t kDirectBytes = 32768;  // up to here it is quicker if every rank reduces everything itself
constexpr int64_t kLargeBytes = 65536;   // from here on, what is laid out of a chunk may be written past the caches
constexpr int64_t kHotBytes = 8192;      // what has just been reduced is still in the L1 cache

struct Range {
  int64_t begin, end;
};

}  // namespace

// The columns of all arrays of one type, one after the other.
class Transport::Stream {
 public:
  Stream(Type type, std::vector<Array> arrays) : type(type), item(size_of(type)), arrays_(std::move(arrays)) {
    for (const Array& array : arrays_) {
      starts_.push_back(columns);
      columns += array.columns;
    }
  }

  // Calls f(array, its first column, n, the columns before in the range) for each array that the range touches.
  template <class F>
  void each(Range range, F f) const {
    auto after = std::upper_bound(starts_.begin(), starts_.end(), range.begin);
    for (size_t i = after - starts_.begin() - 1; i < arrays_.size() && starts_[i] < range.end; ++i) {
      const int64_t begin = std::max(range.begin, starts_[i]);
      const int64_t end = std::min(range.end, starts_[i] + arrays_[i].columns);
      if (begin < end) f(arrays_[i], begin - starts_[i], end - begin, begin - range.begin);
    }
  }

  const Type type;
  const int64_t item;  // bytes
  int64_t columns = 0;

 private:
  std::vector<Array> arrays_;
  std::vector<int64_t> starts_;
};

// One collective on all arrays, cut into chunks of columns that a slot has room for. In a slot, each row of the chunk follows
// the one before. The first ranks of the node, its owners, each reduce a share of the columns of every chunk.
class Transport::Call {
 public:
  Call(Transport& transport, Kind kind, Op op, int divisor, std::vector<Array> arrays)
      : at_(transport.place_), node_(*transport.node_), transport_(transport), kind_(kind), op_(op), divisor_(divisor) {
    me_ = node_.layout().rank;
    local_ = node_.layout().size;
    sources_.resize(local_);
    for (auto begin = arrays.begin(); begin != arrays.end();) {  // all of the first one's type, and then the others
      const Type type = begin->type;
      const auto end = std::stable_partition(begin, arrays.end(), [=](const Array& array) { return array.type == type; });
      streams_.emplace_back(type, std::vector<Array>(begin, end));
      begin = end;
    }
    const int64_t rows = kind == Kind::ReduceScatter ? at_.size : kind == Kind::Allgather && several() ? at_.size + 1 : 1;
    for (const Stream& stream : streams_) {
      const int64_t room = node_.layout().slot_bytes / (rows * stream.item);
      if (room < 1) throw std::runtime_error("too many ranks for the slots of the shared memory");
      const int64_t columns = room < kLine ? room : room / kLine * kLine;
      for (int64_t begin = 0; begin < stream.columns; begin += columns) {
        chunks_.push_back({&stream, {begin, std::min(begin + columns, stream.columns)}, -1});
        const int64_t laid_out = bytes(chunks_.back()) * (kind == Kind::ReduceScatter ? at_.size : 1);
        // between nodes the network decides how long it takes
        if (kCanStream && !several() && laid_out >= kLargeBytes) chunks_.back().large = large_++;
      }
    }
    direct_ = kind == Kind::Allreduce && !several() && chunks_.size() == 1 && bytes(chunks_[0]) * local_ <= kDirectBytes;
  }

  Node::Message message(int64_t word) {
    Node::Message message = {static_cast<int64_t>(chunks_.size()), word, {}, {}, {}};
    message.lay_out = timed(&Call::lay_out);
    if (kind_ == Kind::Allgather && !several()) {
      message.reduce = timed(&Call::gather);
    } else if (direct_) {
      message.reduce = timed(&Call::reduce_all);
    } else {
      message.reduce = timed(&Call::reduce_share);
      message.take = timed(&Call::take);
    }
    return message;
  }

  void end() { transport_.stores_.end(large_); }

 private:
  struct Chunk {
    const Stream* stream;
    Range columns;
    int64_t large;  // its number among the large ones of the message, or -1
  };

  bool several() const { return transport_.several_; }
  static int64_t count(const Chunk& chunk) { return chunk.columns.end - chunk.columns.begin; }
  static int64_t bytes(const Chunk& chunk) { return count(chunk) * chunk.stream->item; }

  // The columns of a chunk, counted from its first, that an owner reduces.
  Range share(const Chunk& chunk, int owner) const {
    const int64_t line = std::max<int64_t>(1, kLine / chunk.stream->item), n = count(chunk);
    const int64_t each = ((n + at_.owners - 1) / at_.owners + line - 1) / line * line;
    return {std::min(n, owner * each), std::min(n, (owner + 1) * each)};
  }

  // A step of the message, by the number of the chunk.
  std::function<void(int64_t)> timed(void (Call::*step)(int64_t)) {
    return [this, step](int64_t k) {
      const int64_t large = chunks_[k].large;
      if (large < 0) return (this->*step)(k);
      transport_.stores_.time(large, bytes(chunks_[k]), [=] { (this->*step)(k); });
    };
  }

  bool streams(int64_t k) const { return chunks_[k].large >= 0 && transport_.stores_.streams(chunks_[k].large); }

  // f(array, its first column, n, the column of the chunk) for the arrays of some columns of a chunk
  template <class F>
  void each(const Chunk& chunk, Range part, F f) const {
    const Range columns = {chunk.columns.begin + part.begin, chunk.columns.begin + part.end};
    chunk.stream->each(
        columns, [&](const Array& a, int64_t column, int64_t n, int64_t before) { f(a, column, n, part.begin + before); });
  }

  char* at(int64_t k, int rank, int64_t row, int64_t column) const {
    const Chunk& chunk = chunks_[k];
    return node_.slot(rank, k) + (row * count(chunk) + column) * chunk.stream->item;
  }

  void lay_out(int64_t k) {
    const Chunk& chunk = chunks_[k];
    const int64_t item = chunk.stream->item, rows = kind_ == Kind::ReduceScatter ? at_.size : 1;
    const auto write = streams(k) ? stream_bytes : copy_bytes;
    auto lay = [&](Range part) {
      for (int64_t row = 0; row < rows; ++row) {
        each(chunk, part, [&](const Array& a, int64_t column, int64_t n, int64_t to) {
          write(at(k, me_, row, to), a.in + (row * a.columns + column) * item, n * item);
        });
      }
    };
    if (direct_ || kind_ == Kind::Allgather || me_ >= at_.owners) return lay({0, count(chunk)});
    const Range mine = share(chunk, me_);
    lay({0, mine.begin});
    lay({mine.end, count(chunk)});
  }

  // Where each rank of the node has a row of the chunk; this one has its own array.
  const void* const* sources(int64_t k, int64_t row, int64_t column, const void* own) {
    for (int rank = 0; rank < local_; ++rank) sources_[rank] = rank == me_ ? own : at(k, rank, row, column);
    return sources_.data();
  }

  void reduce_all(int64_t k) {
    const Chunk& chunk = chunks_[k];
    each(chunk, {0, count(chunk)}, [&](const Array& a, int64_t column, int64_t n, int64_t from) {
      reduce(a.type, op_, sources(k, 0, from, at(k, me_, 0, from)), local_, divisor_, a.out + column * chunk.stream->item,
             nullptr, n);
    });
  }

  void gather(int64_t k) {
    const Chunk& chunk = chunks_[k];
    const int64_t item = chunk.stream->item;
    each(chunk, {0, count(chunk)}, [&](const Array& a, int64_t column, int64_t n, int64_t from) {
      for (int rank = 0; rank < local_; ++rank) {
        const char* row = rank == me_ ? a.in + column * item : at(k, rank, 0, from);
        copy_bytes(a.out + (at_.order[rank] * a.columns + column) * item, row, n * item);
      }
    });
  }

  void reduce_share(int64_t k) {
    const Chunk& chunk = chunks_[k];
    const Range mine = share(chunk, me_);
    if (me_ >= at_.owners || mine.begin == mine.end) return;
    if (kind_ == Kind::Allgather) return gather_between(k, mine);
    const int64_t rows = kind_ == Kind::ReduceScatter ? at_.size : 1;
    if (several()) return reduce_between(k, mine, rows);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = rows == 1 ? 0 : at_.order[i];
      each(chunk, mine, [&](const Array& a, int64_t column, int64_t n, int64_t from) {
        const int64_t item = chunk.stream->item;
        const char* own = a.in + (row * a.columns + column) * item;
        char *out = a.out + column * item, *slot = at(k, me_, i, from);
        const bool own_result = rows == 1 || i == me_, others_result = rows == 1 || i != me_;
        reduce_piece(k, row, from, own, own_result ? out : nullptr, others_result ? slot : nullptr, n);
      });
    }
  }

  // To one of `out` and `slot`, or to both.
  void reduce_piece(int64_t k, int64_t row, int64_t from, const char* own, char* out, char* slot, int64_t n) {
    const Type type = chunks_[k].stream->type;
    const int64_t item = size_of(type), hot = kHotBytes / item;
    if (!slot || !streams(k)) {
      return reduce(type, op_, sources(k, row, from, own), local_, divisor_, out ? out : slot, out ? slot : nullptr, n);
    }
    alignas(kLine) char block[kHotBytes];
    for (int64_t i = 0; i < n; i += hot) {
      const int64_t m = std::min(hot, n - i);
      char* reduced = out ? out + i * item : block;
      reduce(type, op_, sources(k, row, from + i, own + i * item), local_, divisor_, reduced, nullptr, m);
      stream_bytes(slot + i * item, reduced, m * item);
    }
  }

  void reduce_between(int64_t k, Range mine, int64_t rows) {
    const Chunk& chunk = chunks_[k];
    const Type type = chunk.stream->type;
    const int64_t item = chunk.stream->item, wide_item = size_of(wide(type)), n = mine.end - mine.begin;
    char* partial = room(transport_.partial_, rows * n * wide_item);
    const int64_t rows_here = rows == 1 ? 1 : local_;
    char* total = room(transport_.total_, rows_here * n * wide_item);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = rows == 1 ? 0 : at_.order[i];
      each(chunk, mine, [&](const Array& a, int64_t column, int64_t m, int64_t from) {
        const void* const* all = sources(k, row, from, a.in + (row * a.columns + column) * item);
        combine(type, op_, all, local_, partial + (i * n + from - mine.begin) * wide_item, m);
      });
    }
    if (rows == 1)
      transport_.nodes_->allreduce(type, op_, partial, total, n);
    else
      transport_.nodes_->reduce_scatter(type, op_, partial, total, n);
    for (int64_t i = 0; i < rows_here; ++i) {
      finish(type, total + i * n * wide_item, divisor_, at(k, me_, i, mine.begin), n);
    }
    take_from(k, me_);
  }

  void gather_between(int64_t k, Range mine) {
    const int64_t n = (mine.end - mine.begin) * chunks_[k].stream->item;
    char* partial = room(transport_.partial_, local_ * n);
    char* total = room(transport_.total_, at_.size * n);
    for (int rank = 0; rank < local_; ++rank) copy_bytes(partial + rank * n, at(k, rank, 0, mine.begin), n);
    transport_.nodes_->allgather(partial, total, n);
    for (int i = 0; i < at_.size; ++i) copy_bytes(at(k, me_, 1 + at_.order[i], mine.begin), total + i * n, n);
    take_from(k, me_);
  }

  void take(int64_t k) {
    for (int owner = 0; owner < at_.owners; ++owner) {
      if (owner != me_) take_from(k, owner);
    }
  }

  // What an owner has reduced, or gathered from other nodes, from its slot.
  void take_from(int64_t k, int owner) {
    const Chunk& chunk = chunks_[k];
    const int64_t item = chunk.stream->item;
    each(chunk, share(chunk, owner), [&](const Array& a, int64_t column, int64_t n, int64_t from) {
      if (kind_ == Kind::Allgather) {
        for (int64_t row = 0; row < at_.size; ++row) {
          copy_bytes(a.out + (row * a.columns + column) * item, at(k, owner, 1 + row, from), n * item);
        }
      } else {
        copy_bytes(a.out + column * item, at(k, owner, kind_ == Kind::ReduceScatter ? me_ : 0, from), n * item);
      }
    });
  }

  static char* room(std::vector<char>& buffer, int64_t bytes) {
    if (static_cast<int64_t>(buffer.size()) < bytes) buffer.resize(bytes);
    return buffer.data();
  }

  const Place& at_;
  const Node& node_;
  Transport& transport_;
  const Kind kind_;
  const Op op_;
  const int divisor_;
  int me_, local_;  // of the node's ranks
  bool direct_;
  int64_t large_ = 0;  // chunks
  std::vector<Stream> streams_;
  std::vector<Chunk> chunks_;
  std::vector<const void*> sources_;
};

Transport::Transport(const Place& place, std::unique_ptr<Node> node)
    : place_(place), node_(std::move(node)), several_(place.size > node_->layout().size) {}

Extremes Transport::exchange(const Node::Message& message) {
  if (!several_) return node_->exchange(message, nullptr);
  return node_->exchange(message, [this](Extremes mine) { return nodes_->extremes(mine); });
}

Extremes Transport::meet(int64_t word) { return exchange({0, word, {}, {}, {}}); }

void Transport::run(Kind kind, Op op, int divisor, int64_t word, std::vector<Array> arrays) {
  Call call(*this, kind, op, divisor, std::move(arrays));
  const Extremes words = exchange(call.message(word));
  if (words.smallest != words.largest) throw Disagreement("the ranks do not do the same");
  call.end();
}

}  // namespace jaxmpi
