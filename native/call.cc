#include "call.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace jaxmpi {
namespace {

constexpr int64_t kLine = 64;  // bytes: shares of a chunk begin on cache lines

}  // namespace

int64_t bytes_of(const std::vector<Array>& arrays) {
  int64_t bytes = 0;
  for (const Array& array : arrays) bytes += array.bytes();
  return bytes;
}

Topology::Topology(int rank, std::vector<int> order, std::vector<int> ranks, int node)
    : rank(rank), size(order.size()), order(std::move(order)), ranks(std::move(ranks)), node(node) {
  owners = *std::min_element(this->ranks.begin(), this->ranks.end());
  int first = 0;
  for (int each : this->ranks) firsts.push_back(std::exchange(first, first + each));
}

int Topology::node_of(int rank, int& local) const {
  const auto position = std::find(order.begin(), order.end(), rank) - order.begin();
  const auto after = std::upper_bound(firsts.begin(), firsts.end(), position);
  local = static_cast<int>(position) - after[-1];
  return static_cast<int>(after - firsts.begin()) - 1;
}

Stream::Stream(Type type, std::vector<Array> arrays)
    : type(type), item(size_of(type)), arrays_(std::move(arrays)) {
  for (const Array& array : arrays_) {
    starts_.push_back(columns);
    columns += array.columns;
  }
}

Call::Call(const Topology& topology, const Node& node, const Operation& operation,
           std::vector<Array> arrays, int64_t rows_in_slot)
    : topology_(topology), node_(node), operation_(operation), owners_(topology.owners) {
  me_ = node_.layout().rank;
  local_ = node_.layout().size;
  sources_.resize(local_);
  // One stream for each type, in the order in which the types first appear: it follows from the
  // arrays alone, and is the same on all ranks.
  for (auto begin = arrays.begin(); begin != arrays.end();) {
    const Type type = begin->type;
    const auto end = std::stable_partition(begin, arrays.end(),
                                           [=](const Array& array) { return array.type == type; });
    streams_.emplace_back(type, std::vector<Array>(begin, end));
    begin = end;
  }
  // Cut each stream into chunks that fit a slot with all their rows, on cache lines where they can
  // be.
  for (const Stream& stream : streams_) {
    const int64_t slot_bytes = node_.layout().slot_bytes, least = rows_in_slot * stream.item;
    const int64_t room = slot_bytes / least;
    if (room < 1)
      throw std::runtime_error("a chunk has " + std::to_string(slot_bytes) +
                               " bytes, and this collective of " + std::to_string(topology.size) +
                               " ranks needs " + std::to_string(least) +
                               " or more. Set chunk_bytes in JAXMPI_TUNE to as many, or leave it "
                               "out");
    const int64_t columns = room < kLine ? room : room / kLine * kLine;
    for (int64_t begin = 0; begin < stream.columns; begin += columns) {
      chunks_.push_back({&stream, {begin, std::min(begin + columns, stream.columns)}});
    }
  }
}

int64_t Call::rows_in() const {
  return operation_.kind == Kind::ReduceScatter || operation_.kind == Kind::Alltoall
             ? topology_.size
             : 1;
}

Range Call::share(const Chunk& chunk, int owner) const {
  // Shares end on cache lines: two owners never write to the same one.
  const int64_t line = std::max<int64_t>(1, kLine / chunk.stream->item), n = count(chunk);
  const int64_t each = ((n + owners_ - 1) / owners_ + line - 1) / line * line;
  return {std::min(n, owner * each), std::min(n, (owner + 1) * each)};
}

char* Call::at(int64_t k, int rank, int64_t row, int64_t column) const {
  const Chunk& chunk = chunks_[k];
  return node_.slot(rank, k) + (row * count(chunk) + column) * chunk.stream->item;
}

void Call::lay_out(int64_t k, decltype(copy_bytes)* write) const {
  const Chunk& chunk = chunks_[k];
  const int64_t item = chunk.stream->item;
  auto lay = [&](Range part) {
    for (int64_t row = 0; row < rows_in(); ++row) {
      each(chunk, part, [&](const Array& a, int64_t column, int64_t n, int64_t to) {
        write(at(k, me_, row, to), a.in + (row * a.pitch() + column) * item, n * item);
      });
    }
  };
  // This rank reads its own share from its arrays when it reduces, so nobody needs it in the slot.
  const bool reduces = operation_.kind == Kind::Allreduce || operation_.kind == Kind::ReduceScatter;
  if (!reduces || me_ >= owners_) return lay({0, count(chunk)});
  const Range mine = share(chunk, me_);
  lay({0, mine.begin});
  lay({mine.end, count(chunk)});
}

const void* const* Call::sources(int64_t k, int64_t row, int64_t column, const void* own) {
  for (int rank = 0; rank < local_; ++rank)
    sources_[rank] = rank == me_ ? own : at(k, rank, row, column);
  return sources_.data();
}

void Call::store(int64_t k, int64_t row, const char* from) const {
  const Chunk& chunk = chunks_[k];
  const int64_t item = chunk.stream->item;
  each(chunk, {0, count(chunk)}, [&](const Array& a, int64_t column, int64_t n, int64_t before) {
    copy_bytes(a.out + (row * a.pitch() + column) * item, from + before * item, n * item);
  });
}

void Call::store_own(int64_t k, int64_t row, int64_t from) const {
  const Chunk& chunk = chunks_[k];
  const int64_t item = chunk.stream->item;
  each(chunk, {0, count(chunk)}, [&](const Array& a, int64_t column, int64_t n, int64_t) {
    copy_bytes(a.out + (row * a.pitch() + column) * item, a.in + (from * a.pitch() + column) * item,
               n * item);
  });
}

void Call::store_zeros(int64_t k) const {
  const Chunk& chunk = chunks_[k];
  const int64_t item = chunk.stream->item;
  each(chunk, {0, count(chunk)}, [&](const Array& a, int64_t column, int64_t n, int64_t) {
    std::memset(a.out + column * item, 0, n * item);
  });
}

void Call::gather(int64_t k) const {
  const int base = topology_.firsts[topology_.node];
  const bool by_rank = operation_.kind == Kind::Allgather || operation_.kind == Kind::Alltoall;
  const int64_t from = operation_.kind == Kind::Alltoall ? topology_.rank : 0;
  for (int rank = 0; rank < local_; ++rank) {
    const int theirs = topology_.order[base + rank];
    if (!by_rank && theirs != operation_.source) continue;
    const int64_t row = by_rank ? theirs : 0;
    // This rank's own row is copied from its arrays, which its caches may still have.
    rank == me_ ? store_own(k, row, from) : store(k, row, at(k, rank, from, 0));
  }
  if (operation_.kind == Kind::Permute && operation_.source < 0) store_zeros(k);
}

}  // namespace jaxmpi
