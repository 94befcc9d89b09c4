// One collective on all arrays of a call, cut into chunks of columns that fit a slot.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "node.h"
#include "reduce.h"

namespace jaxmpi {

enum class Kind : uint8_t { Allreduce, ReduceScatter, Allgather, Bcast, Alltoall, Permute };
constexpr Named<Kind> kKinds[] = {
    {"allreduce", Kind::Allreduce}, {"reduce_scatter", Kind::ReduceScatter},
    {"allgather", Kind::Allgather}, {"bcast", Kind::Bcast},
    {"alltoall", Kind::Alltoall},   {"permute", Kind::Permute},
};

struct Operation {
  Kind kind;
  Op op;
  int divisor;  // of the sum: the number of ranks in a mean, else 1
  // The ranks from which this one receives and to which it sends in a permute, or -1; `source` is
  // the root in a bcast.
  int source, dest;
  // Whether it is a part of a large message, whose algorithm it uses, and whose bits it gives.
  bool bucket = false;
  bool overlapped = false;  // whether the rank computes meanwhile, and needs its cores
};

// One array of a call, as a matrix of `columns`. `in` has a row for each rank in a reduce-scatter
// and an alltoall, `out` in an allgather and an alltoall; otherwise they have one row. In an
// allreduce, the two may be the same memory.
struct Array {
  Type type;
  const char* in;
  char* out;
  int64_t columns;
  int64_t row = 0;  // columns from one row to the next, if the array is a part of a larger one

  int64_t pitch() const { return row ? row : columns; }
  int64_t bytes() const { return columns * size_of(type); }  // of a row
};

// The bytes of one row of all arrays.
int64_t bytes_of(const std::vector<Array>& arrays);

// Where the ranks of a job, or of a group of ranks, are.
struct Topology {
  Topology(int rank, std::vector<int> order, std::vector<int> ranks, int node);

  int rank, size;           // in the job, or in the group
  std::vector<int> order;   // the ranks, by node, and by local rank within a node
  std::vector<int> ranks;   // how many each node has
  std::vector<int> firsts;  // where the ranks of each node begin in `order`
  int node;                 // the node of this rank
  int owners;               // how many ranks of each node reduce: as many as the smallest node has

  int nodes() const { return static_cast<int>(ranks.size()); }
  int node_of(int rank, int& local) const;  // sets its local rank, too
};

struct Range {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};

// The columns of all arrays of one type, one after the other.
class Stream {
 public:
  Stream(Type type, std::vector<Array> arrays);

  // Call f(array, its first column, n, the columns before it in the range) for each array that the
  // range touches.
  template <class F>
  void each(Range range, F f) const {
    auto after = std::upper_bound(starts_.begin(), starts_.end(), range.begin);
    for (size_t i = after - starts_.begin() - 1; i < arrays_.size() && starts_[i] < range.end;
         ++i) {
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

// What a collective within a node and one between nodes have in common. In a slot, the rows of a
// chunk follow each other. The first ranks of the node, its owners, each reduce a share of the
// columns of every chunk.
class Call {
 public:
  Call(const Topology& topology, const Node& node, const Operation& operation,
       std::vector<Array> arrays, int64_t rows_in_slot);

 protected:
  struct Chunk {
    const Stream* stream;
    Range columns;
  };

  static int64_t count(const Chunk& chunk) { return chunk.columns.count(); }
  static int64_t bytes(const Chunk& chunk) { return count(chunk) * chunk.stream->item; }
  int64_t rows_in() const;  // rows of each operand

  // Return the columns of a chunk, counted from its first, that an owner reduces.
  Range share(const Chunk& chunk, int owner) const;

  // Call f(array, its first column, n, the column of the chunk) for the arrays of some columns of a
  // chunk.
  template <class F>
  void each(const Chunk& chunk, Range part, F f) const {
    const Range columns = {chunk.columns.begin + part.begin, chunk.columns.begin + part.end};
    chunk.stream->each(columns, [&](const Array& a, int64_t column, int64_t n, int64_t before) {
      f(a, column, n, part.begin + before);
    });
  }

  // Return where a rank of the node has an item of chunk k in its slot.
  char* at(int64_t k, int rank, int64_t row, int64_t column) const;

  // Write this rank's part of a chunk to its slot, without the share that it reduces itself.
  void lay_out(int64_t k, decltype(copy_bytes)* write) const;

  // Return where each rank of the node has a row of the chunk; for this rank, `own`.
  const void* const* sources(int64_t k, int64_t row, int64_t column, const void* own);

  // Write a row of the results: from a row of a chunk, from a row of this rank's operands, or
  // zeros.
  void store(int64_t k, int64_t row, const char* from) const;
  void store_own(int64_t k, int64_t row, int64_t from) const;
  void store_zeros(int64_t k) const;

  // Copy the rows that the ranks of this node have for this one, in a collective that only moves
  // arrays.
  void gather(int64_t k) const;

  const Topology& topology_;
  const Node& node_;
  const Operation operation_;
  int me_, local_;  // this rank's number among the ranks of the node, and how many these are
  int owners_;      // how many ranks of the node reduce in this collective
  std::vector<Stream> streams_;
  std::vector<Chunk> chunks_;
  std::vector<const void*> sources_;
};

}  // namespace jaxmpi
