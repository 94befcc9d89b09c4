// One collective on all arrays of a call, cut into chunks of columns that a slot has room for.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "node.h"
#include "reduce.h"

namespace jaxmpi {

// By position, as in jaxmpi/_backends/native.py.
enum class Kind : uint8_t { Allreduce, ReduceScatter, Allgather, Bcast, Alltoall, Permute };

struct Operation {
  Kind kind;
  Op op;
  int divisor;
  int source, dest;  // ranks: the root of a bcast; in a permute, from and to whom this rank's array
                     // goes, or -1
  bool bucket = false;  // whether it is a part of a large message: it takes the algorithm of that,
                        // and gives the same bits
  bool beside = false;  // whether the rank computes meanwhile, and needs its cores
};

// One array of a call, as a matrix of `columns`: `in` has a row for each rank in a reduce-scatter
// and an alltoall, and `out` in an allgather and an alltoall; one row otherwise. In an allreduce,
// the two may be the same memory.
struct Array {
  Type type;
  const char* in;
  char* out;
  int64_t columns;
  int64_t row = 0;  // columns from one row to the next, where these are a part of it

  int64_t pitch() const { return row ? row : columns; }
  int64_t bytes() const { return columns * size_of(type); }  // of a row
};

int64_t bytes_of(const std::vector<Array>& arrays);

struct Place {
  Place(int rank, std::vector<int> order, std::vector<int> ranks, int node);

  int rank, size;           // in the job, or in the group of ranks that this is a transport of
  std::vector<int> order;   // of the ranks: by node, and by local rank within
  std::vector<int> ranks;   // how many each node has
  std::vector<int> firsts;  // where those of each node begin, in `order`
  int node;                 // of this rank
  int owners;               // how many ranks of each node reduce

  int nodes() const { return static_cast<int>(ranks.size()); }
  int node_of(int rank, int& local) const;  // and its local rank
};

struct Range {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};

// The columns of all arrays of one type, one after the other.
class Stream {
 public:
  Stream(Type type, std::vector<Array> arrays);

  // Calls f(array, its first column, n, the columns before in the range) for each array that the
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

// In a slot, each row of the chunk follows the one before. The first ranks of the node, its owners,
// each reduce a share of the columns of every chunk.
class Call {
 public:
  Call(const Place& place, const Node& node, const Operation& operation, std::vector<Array> arrays,
       int64_t rows_in_slot);

 protected:
  struct Chunk {
    const Stream* stream;
    Range columns;
  };

  static int64_t count(const Chunk& chunk) { return chunk.columns.count(); }
  static int64_t bytes(const Chunk& chunk) { return count(chunk) * chunk.stream->item; }
  int64_t rows_in() const;  // of each array

  // The columns of a chunk, counted from its first, that an owner reduces.
  Range share(const Chunk& chunk, int owner) const;

  // f(array, its first column, n, the column of the chunk) for the arrays of some columns of a
  // chunk
  template <class F>
  void each(const Chunk& chunk, Range part, F f) const {
    const Range columns = {chunk.columns.begin + part.begin, chunk.columns.begin + part.end};
    chunk.stream->each(columns, [&](const Array& a, int64_t column, int64_t n, int64_t before) {
      f(a, column, n, part.begin + before);
    });
  }

  char* at(int64_t k, int rank, int64_t row, int64_t column) const;

  // Write this rank's part of a chunk to its slot, but for what it will reduce itself.
  void lay_out(int64_t k, decltype(copy_bytes)* write) const;

  // Where each rank of the node has a row of the chunk; this one has its own array.
  const void* const* sources(int64_t k, int64_t row, int64_t column, const void* own);

  // To a row of the arrays: a row of a chunk that lies in one piece, or a row of this rank's own
  // arrays, or zeros.
  void store(int64_t k, int64_t row, const char* from) const;
  void store_own(int64_t k, int64_t row, int64_t from) const;
  void store_zeros(int64_t k) const;

  // The rows that the ranks of this node have for this one: of a collective that only moves arrays.
  void gather(int64_t k) const;

  const Place& at_;
  const Node& node_;
  const Operation operation_;
  int me_, local_;  // of the node's ranks
  int owners_;
  std::vector<Stream> streams_;
  std::vector<Chunk> chunks_;
  std::vector<const void*> sources_;
};

}  // namespace jaxmpi
