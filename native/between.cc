#include "between.h"

#include <algorithm>
#include <cstring>

#include "backoff.h"

namespace jaxmpi {
namespace {

constexpr int64_t kHotBytes = 8192;  // a block that stays in the L1 cache

// The tags of MPI's messages. Fingerprints have one, and chunks are numbered modulo kTagged.
//
// A chunk that is sent before the ranks have agreed has a tag of its own, which changes at every
// mismatch: what was sent in a message that the ranks did not agree on is never received, and must
// not be taken for what the next message sends.
constexpr int kFirstTag = 1, kTag = 2, kTagged = 16384;
constexpr int kAheadTag = kTag + kTagged, kAheadTagged = 8192;

int64_t rows_in_slot(Kind kind, int size) {
  switch (kind) {
    case Kind::ReduceScatter:
    case Kind::Alltoall: return size;
    case Kind::Allgather: return size + 1;  // this rank's, and all rows that an owner gathers
    default: return 1;
  }
}

// Return the memory of a buffer, which grows to the largest message and is kept for the next ones.
char* room(std::vector<char>& buffer, int64_t bytes) {
  if (static_cast<int64_t>(buffer.size()) < bytes) buffer.resize(bytes);
  return buffer.data();
}

bool is_short_float(Type type) { return wide(type) != type; }

// total = total op x, where short floats x are widened to float32 first.
void accumulate(Type type, Op op, const char* x, char* total, int64_t n) {
  if (!is_short_float(type)) return combine_wide(type, op, total, x, total, n);
  constexpr int64_t hot = kHotBytes / sizeof(float);
  alignas(64) float widened[hot];
  for (int64_t i = 0; i < n; i += hot) {
    const int64_t m = std::min(hot, n - i);
    const void* source = x + i * size_of(type);
    char* to = total + i * sizeof(float);
    combine(type, op, &source, 1, widened, m);
    combine_wide(type, op, to, widened, to, m);
  }
}

}  // namespace

BetweenNodes::BetweenNodes(const Topology& topology, const Node& node, Channels& channels,
                           const Operation& operation, std::vector<Array> arrays)
    : Call(topology, node, operation, std::move(arrays),
           rows_in_slot(operation.kind, topology.size)),
      channels_(channels) {
  nodes_ = topology_.nodes();
  alone_ = topology_.size == nodes_;
  direct_ = nodes_ <= channels_.tuning.direct_nodes;
  if (operation_.kind == Kind::Bcast)
    root_node_ = topology_.node_of(operation_.source, root_local_);
  // A small allreduce travels with the comparison of the fingerprints: ⌈log2 p⌉ delays in all. A
  // bucket never does: it must give the bits that the whole message would give.
  if (operation_.kind == Kind::Allreduce && chunks_.size() == 1 && !operation_.bucket) {
    at_once_ =
        count(chunks_[0]) * size_of(wide(chunks_[0].stream->type)) <= channels_.tuning.small_bytes;
  }
  if (at_once_) owners_ = 1;  // the first rank of the node reduces the only chunk
  // A small alltoall or permute needs nothing of the other ranks of the node, and is sent before
  // the ranks have agreed.
  if (moves() && chunks_.size() == 1) {
    const int64_t messages = operation_.kind == Kind::Alltoall ? topology_.size : 1;
    ahead_ = messages * bytes(chunks_[0]) <= channels_.tuning.small_bytes;
  }
}

Node::Message BetweenNodes::message(int64_t fingerprint) {
  Node::Message message = {static_cast<int64_t>(chunks_.size()), fingerprint, {}, {}, {}};
  message.lay_out = [this](int64_t k) { write(k); };
  message.reduce = [this](int64_t k) { begin(k); };
  if (!moves()) message.take = [this](int64_t k) { take(k); };
  if (ahead_)
    message.send_ahead = [this] {
      channel(0).exchange.send_ahead(*channels_.network, tag(0), rows_between(0));
    };
  message.give_up = [this] {
    if (ahead_) channel(0).exchange.give_up();
    ++channels_.mismatches;
  };
  message.across_nodes = [this](FingerprintRange range) { return agree(range); };
  message.advance = [this] { return advance(); };
  message.is_reduced = [this](int64_t k) { return channel(k).done; };
  message.at_once = at_once_;
  return message;
}

// Compare the fingerprints of all nodes, on the first rank of each, by recursive doubling. As long
// as they are equal, the messages also carry what a small allreduce has reduced so far.
FingerprintRange BetweenNodes::agree(FingerprintRange range) {
  Network& network = *channels_.network;
  const int64_t most = sizeof(FingerprintRange) + channels_.tuning.small_bytes;
  int64_t wide_bytes = 0;
  room(channels_.mine, most);
  room(channels_.theirs, most);
  auto* mine = reinterpret_cast<FingerprintRange*>(channels_.mine.data());
  *mine = range;
  if (at_once_) {
    // Reduce the arrays of this node, which all of its ranks have laid out.
    const Chunk& chunk = chunks_[0];
    const int64_t wide_item = size_of(wide(chunk.stream->type));
    wide_bytes = count(chunk) * wide_item;
    if (mine->equal()) {
      each(chunk, {0, count(chunk)}, [&](const Array& a, int64_t column, int64_t n, int64_t from) {
        combine(a.type, operation_.op, sources(0, 0, from, a.in + column * size_of(a.type)), local_,
                channels_.mine.data() + sizeof(FingerprintRange) + from * wide_item, n);
      });
    }
  }
  // While a program computes, this thread sleeps soon, or it would take the core from it.
  const auto what =
      operation_.overlapped ? Backoff::Awaited::kMessages : Backoff::Awaited::kShortMessage;
  for (const Round& round : recursive_doubling_schedule(nodes_, topology_.node)) {
    for (const Transfer& transfer : round) {
      int pending = 0;
      // The receive is posted first, so that the message is stored where it belongs at once. Its
      // length is not known: a node whose fingerprints differ sends the fingerprints alone.
      if (transfer.from >= 0) {
        network.receive(peer(transfer.from), kFirstTag, channels_.theirs.data(), most, pending);
      }
      if (transfer.to >= 0) {
        const int64_t bytes = mine->equal() ? wide_bytes : 0;
        network.send(peer(transfer.to), kFirstTag, channels_.mine.data(),
                     sizeof(FingerprintRange) + bytes, pending);
      }
      for (Backoff backoff(node_.layout().crowded, what); pending > 0;) {
        network.progress() ? backoff.reset() : static_cast<void>(backoff.pause());
      }
      if (transfer.from >= 0) merge(transfer, wide_bytes);
    }
  }
  if (at_once_ && mine->equal()) finish_small();
  return {mine->smallest, mine->largest};
}

// Merge what has arrived into what this node has: the ranges of the fingerprints, and the arrays of
// a small allreduce, in the order of the nodes, or the bits of a NaN would differ between ranks.
void BetweenNodes::merge(const Transfer& transfer, int64_t wide_bytes) {
  auto* mine = reinterpret_cast<FingerprintRange*>(channels_.mine.data());
  const auto* theirs = reinterpret_cast<const FingerprintRange*>(channels_.theirs.data());
  *mine = mine->with(*theirs);
  if (!mine->equal() || wide_bytes == 0) return;
  char *here = channels_.mine.data() + sizeof(FingerprintRange),
       *there = channels_.theirs.data() + sizeof(FingerprintRange);
  // The finished sum comes back to a node that has left its part with a neighbor.
  if (!transfer.reduces) {
    std::memcpy(here, there, wide_bytes);
    return;
  }
  const Type type = chunks_[0].stream->type;
  const bool first = topology_.node < transfer.from;
  combine_wide(type, operation_.op, first ? here : there, first ? there : here, here,
               count(chunks_[0]));
}

// Divide and round a small allreduce: into this rank's arrays, and into its slot for the others.
void BetweenNodes::finish_small() {
  const Chunk& chunk = chunks_[0];
  const int64_t item = chunk.stream->item, wide_item = size_of(wide(chunk.stream->type));
  each(chunk, {0, count(chunk)}, [&](const Array& a, int64_t column, int64_t n, int64_t from) {
    char* out = a.out + column * item;
    finish(a.type, channels_.mine.data() + sizeof(FingerprintRange) + from * wide_item,
           operation_.divisor, out, n);
    if (local_ > 1) copy_bytes(at(0, me_, 0, from), out, n * item);
  });
}

// Lay out a chunk; of a broadcast, only the root has one.
void BetweenNodes::write(int64_t k) {
  if (operation_.kind != Kind::Bcast || operation_.source == topology_.rank) lay_out(k, copy_bytes);
}

// Begin the exchange of a chunk, which all ranks of this node have laid out.
void BetweenNodes::begin(int64_t k) {
  Channel& channel = this->channel(k);
  begun_ = k + 1;
  channel.done = false;
  const Range mine = share(chunks_[k], me_);
  // A rank that owns no share of the chunk has nothing to exchange.
  if (!moves() && (me_ >= owners_ || mine.count() == 0)) return exchange(k, channel, {}, {});
  if (reduces()) {
    // Short floats are divided before they are rounded to be sent, because a sum of float16 might
    // overflow. What is sent unrounded is divided at the end, which rounds once less.
    const bool rounded = is_short_float(chunks_[k].stream->type) && (!alone_ || !direct_);
    before_ = rounded ? operation_.divisor : 1;
    after_ = rounded ? 1 : operation_.divisor;
  }
  switch (operation_.kind) {
    case Kind::Allreduce: return pairs() ? begin_pair(k, channel) : begin_reduce(k, channel);
    case Kind::ReduceScatter: return begin_reduce(k, channel);
    case Kind::Allgather: return begin_allgather(k, channel);
    case Kind::Bcast: return begin_bcast(k, channel);
    case Kind::Alltoall:
    case Kind::Permute: return begin_rows(k, channel);
  }
}

void BetweenNodes::exchange(int64_t k, Channel& channel, Stages stages, std::function<void()> end) {
  channel.exchange.begin(*channels_.network, tag(k), std::move(stages), std::move(end));
  channel.done = channel.exchange.advance();
}

// One tag for each chunk that may be in transit: MPI keeps the order of messages with the same tag
// between two ranks, and so the rounds of a chunk need no tags of their own.
int BetweenNodes::tag(int64_t k) const {
  return ahead_ ? kAheadTag + channels_.mismatches % kAheadTagged
                : kTag + node_.sequence(k) % kTagged;
}

bool BetweenNodes::advance() {
  bool moved = channels_.network->progress();
  // Only chunks between `advanced_` and `begun_` can be in transit.
  while (advanced_ < begun_ && channel(advanced_).done) ++advanced_;
  if (!moved) return false;
  for (int64_t k = advanced_; k < begun_; ++k) {
    Channel& channel = this->channel(k);
    if (!channel.done) channel.done = channel.exchange.advance();
  }
  return true;
}

// Return where the block of each node begins, in items; block i belongs to node (node + i) mod p. A
// block has n items for each rank of its node, or n items in an allreduce.
std::vector<int64_t> BetweenNodes::starts(int64_t n) const {
  std::vector<int64_t> starts = {0};
  for (int i = 0; i < nodes_; ++i) {
    const int64_t rows =
        operation_.kind == Kind::Allreduce ? 1 : topology_.ranks[(topology_.node + i) % nodes_];
    starts.push_back(starts.back() + rows * n);
  }
  return starts;
}

// Reduce a part of a row over the ranks of this node, into `to`, rounded to the type of the arrays.
void BetweenNodes::partial(int64_t k, Range part, int64_t row, char* to) {
  const int64_t item = chunks_[k].stream->item;
  each(chunks_[k], part, [&](const Array& a, int64_t column, int64_t n, int64_t from) {
    const char* own = a.in + (row * a.pitch() + column) * item;
    char* out = to + (from - part.begin) * item;
    if (local_ == 1 && before_ == 1) return copy_bytes(out, own, n * item);
    reduce(a.type, operation_.op, sources(k, row, from, own), local_, before_, out, nullptr, n);
  });
}

// Begin an allreduce of two nodes. They send each other everything: as many bytes as a half there
// and the reduced half back, in one delay instead of two.
void BetweenNodes::begin_pair(int64_t k, Channel& channel) {
  const Range mine = share(chunks_[k], me_);
  const Type type = chunks_[k].stream->type;
  const int64_t item = size_of(type), size = mine.count() * item;
  const int other = 1 - topology_.node;
  char *here = room(channel.partial, size), *there = room(channel.arrived, size);
  partial(k, mine, 0, here);
  Stages stages(1);
  stages[0].moves.push_back({peer(other), here, size, peer(other), there, size});
  exchange(k, channel, std::move(stages), [=, divisor = after_] {
    each(chunks_[k], mine, [&](const Array& a, int64_t column, int64_t n, int64_t from) {
      const int64_t offset = (from - mine.begin) * item;
      // In the order of the nodes, so that both form the same bits.
      const void* both[2];
      both[topology_.node] = here + offset;
      both[other] = there + offset;
      reduce(type, operation_.op, both, 2, divisor, a.out + column * item,
             local_ > 1 ? at(k, me_, 0, from) : nullptr, n);
    });
  });
}

// Begin an allreduce, or a reduce-scatter. Each node reduces one block over all nodes; an allreduce
// then gathers the blocks of all nodes on each.
void BetweenNodes::begin_reduce(int64_t k, Channel& channel) {
  const Chunk& chunk = chunks_[k];
  const Range mine = share(chunk, me_);
  const Type type = chunk.stream->type;
  const int64_t item = chunk.stream->item, n = mine.count();
  const bool whole = operation_.kind == Kind::Allreduce;
  const int64_t block = (n + nodes_ - 1) / nodes_;
  const std::vector<int64_t> starts = this->starts(whole ? block : n);
  // Reduce over the ranks of this node what is for each node: in an allreduce, a block of this
  // owner's share; in a reduce-scatter, the rows of the ranks of that node.
  char* parts = room(channel.partial, starts.back() * item);
  for (int i = 0; i < nodes_; ++i) {
    const int theirs = (topology_.node + i) % nodes_;
    char* to = parts + starts[i] * item;
    if (whole) {
      const int64_t begin = std::min(mine.begin + theirs * block, mine.end),
                    end = std::min(begin + block, mine.end);
      partial(k, {begin, end}, 0, to);
    } else {
      for (int rank = 0; rank < topology_.ranks[theirs]; ++rank) {
        partial(k, mine, topology_.order[topology_.firsts[theirs] + rank], to + rank * n * item);
      }
    }
  }
  Stages stages;
  char* reduced = room(channel.reduced, (whole ? starts.back() : starts[1]) * item);
  direct_ ? add_direct(stages, channel, type, starts) : add_rounds(stages, channel, type, starts);
  if (!whole) {
    // The rows of this node's ranks, one after the other, go to the slot, from where each rank
    // takes its own.
    return exchange(k, channel, std::move(stages), [=] {
      for (int rank = 0; rank < local_; ++rank)
        copy_bytes(at(k, me_, rank, mine.begin), reduced + rank * n * item, n * item);
      take_from(k, me_);
    });
  }
  add_allgather(stages, reduced, item, starts);
  exchange(k, channel, std::move(stages), [=] {
    // Block i is that of node (node + i) mod p: each goes to where it belongs in the share.
    for (int i = 0; i < nodes_; ++i) {
      const int theirs = (topology_.node + i) % nodes_;
      const int64_t begin = std::min(mine.begin + theirs * block, mine.end),
                    end = std::min(begin + block, mine.end);
      each(chunks_[k], {begin, end}, [&](const Array& a, int64_t column, int64_t m, int64_t from) {
        const char* piece = reduced + (starts[i] + from - begin) * item;
        copy_bytes(a.out + column * item, piece, m * item);
        if (local_ > 1) copy_bytes(at(k, me_, 0, from), piece, m * item);
      });
    }
  });
}

// Add the stage of a direct reduce-scatter: each other node sends its part in one message, and the
// parts are reduced in the order of the nodes once all are there, whichever came first.
void BetweenNodes::add_direct(Stages& stages, Channel& channel, Type type,
                              const std::vector<int64_t>& starts) {
  const int64_t item = size_of(type), n = starts[1];
  const char* parts = channel.partial.data();
  char *arrived = room(channel.arrived, (nodes_ - 1) * n * item), *reduced = channel.reduced.data();
  Exchange::Stage stage;
  std::vector<const void*> all(nodes_);
  all[topology_.node] = parts;
  for (const Round& round : reduce_scatter_schedule(nodes_, topology_.node, direct_)) {
    for (const Transfer& t : round) {
      char* to = arrived + (t.send_begin - 1) * n * item;
      all[t.from] = to;
      const int64_t sent = starts[t.send_end] - starts[t.send_begin];
      stage.moves.push_back({peer(t.to), parts + starts[t.send_begin] * item, sent * item,
                             peer(t.from), to, n * item});
    }
  }
  stage.after = [=, op = operation_.op, divisor = after_] {
    reduce(type, op, all.data(), nodes_, divisor, reduced, nullptr, n);
  };
  stages.push_back(std::move(stage));
}

// Add the rounds of a circulant reduce-scatter. Short floats are summed in float32, and rounded for
// each send.
void BetweenNodes::add_rounds(Stages& stages, Channel& channel, Type type,
                              const std::vector<int64_t>& starts) {
  const Op op = operation_.op;
  const int64_t item = size_of(type), wide_item = size_of(wide(type)), n = starts.back();
  const bool rounds = is_short_float(type);
  char* totals = channel.partial.data();
  char* sent = totals;
  // `totals` are the sums of this node so far, and `sent` is where they are rounded to.
  if (rounds) {
    const void* source = channel.partial.data();
    totals = room(channel.totals, n * wide_item);
    combine(type, op, &source, 1, totals, n);
  }
  // All receives are posted when the exchange begins, so each round has memory of its own.
  char *arrived = room(channel.arrived, n * item), *reduced = channel.reduced.data();
  for (const Round& round : reduce_scatter_schedule(nodes_, topology_.node, direct_)) {
    const Transfer& t = round[0];
    const int64_t begin = starts[t.send_begin], m = starts[t.send_end] - begin,
                  received = starts[t.receive_end];
    Exchange::Stage stage;
    stage.moves.push_back(
        {peer(t.to), sent + begin * item, m * item, peer(t.from), arrived, received * item});
    if (rounds)
      stage.before = [=] { finish(type, totals + begin * wide_item, 1, sent + begin * item, m); };
    stage.after = [=] { accumulate(type, op, arrived, totals, received); };
    stages.push_back(std::move(stage));
    arrived += received * item;
  }
  // After the last round, block 0 is complete: it is divided and rounded.
  const int divisor = after_;
  auto last = stages.back().after;
  stages.back().after = [=, n = starts[1]] {
    last();
    finish(type, totals, divisor, reduced, n);
  };
}

// Add the rounds of an allgather of blocks, each received where it belongs.
void BetweenNodes::add_allgather(Stages& stages, char* blocks, int64_t item,
                                 const std::vector<int64_t>& starts) {
  for (const Round& round : allgather_schedule(nodes_, topology_.node, direct_)) {
    Exchange::Stage stage;
    for (const Transfer& t : round) {
      char *sent = blocks + starts[t.send_begin] * item,
           *received = blocks + starts[t.receive_begin] * item;
      stage.moves.push_back({peer(t.to), sent, (starts[t.send_end] - starts[t.send_begin]) * item,
                             peer(t.from), received,
                             (starts[t.receive_end] - starts[t.receive_begin]) * item});
    }
    stages.push_back(std::move(stage));
  }
}

// Begin an allgather: the rows of this node's ranks are block 0, and those of all ranks go to the
// slot, behind this rank's own row.
void BetweenNodes::begin_allgather(int64_t k, Channel& channel) {
  const Range mine = share(chunks_[k], me_);
  const int64_t item = chunks_[k].stream->item, n = mine.count();
  const std::vector<int64_t> starts = this->starts(n);
  char* blocks = room(channel.reduced, starts.back() * item);
  for (int rank = 0; rank < local_; ++rank)
    copy_bytes(blocks + rank * n * item, at(k, rank, 0, mine.begin), n * item);
  Stages stages;
  add_allgather(stages, blocks, item, starts);
  exchange(k, channel, std::move(stages), [=] {
    for (int i = 0; i < nodes_; ++i) {
      const int theirs = (topology_.node + i) % nodes_;
      for (int rank = 0; rank < topology_.ranks[theirs]; ++rank) {
        const int row = topology_.order[topology_.firsts[theirs] + rank];
        copy_bytes(at(k, me_, 1 + row, mine.begin), blocks + (starts[i] + rank * n) * item,
                   n * item);
      }
    }
    take_from(k, me_);
  });
}

// Begin a broadcast along a tree, from the slot of the root to those of the owners of each node.
void BetweenNodes::begin_bcast(int64_t k, Channel& channel) {
  const Range mine = share(chunks_[k], me_);
  const int64_t size = mine.count() * chunks_[k].stream->item;
  char* memory = at(k, topology_.node == root_node_ ? root_local_ : me_, 0, mine.begin);
  Stages stages;
  for (const Round& round : broadcast_schedule(nodes_, topology_.node, root_node_)) {
    Exchange::Stage stage;
    for (const Transfer& t : round) {
      stage.moves.push_back(
          {t.to < 0 ? -1 : peer(t.to), memory, size, t.from < 0 ? -1 : peer(t.from), memory, size});
    }
    stages.push_back(std::move(stage));
  }
  exchange(k, channel, std::move(stages), [=] {
    if (topology_.node != root_node_) take_from(k, me_);
  });
}

// Return what this rank exchanges with ranks of other nodes, from its slot: in an alltoall one row
// with each, in a permute its one row to `dest` and one from `source`.
std::vector<Exchange::Move> BetweenNodes::rows_between(int64_t k) {
  const int64_t size = bytes(chunks_[k]);
  if (operation_.kind == Kind::Permute) {
    int local = 0;
    auto elsewhere = [&](int rank) {
      return rank >= 0 && topology_.node_of(rank, local) != topology_.node ? rank : -1;
    };
    char* arrived = room(channel(k).arrived, size);
    return {{elsewhere(operation_.dest), at(k, me_, 0, 0), size, elsewhere(operation_.source),
             arrived, size}};
  }
  std::vector<Exchange::Move> moves;
  char* arrived = room(channel(k).arrived, (topology_.size - local_) * size);
  for (int i = 1; i < nodes_; ++i) {
    const int theirs = (topology_.node + i) % nodes_;
    for (int rank = 0; rank < topology_.ranks[theirs]; ++rank, arrived += size) {
      const int other = topology_.order[topology_.firsts[theirs] + rank];
      moves.push_back({other, at(k, me_, other, 0), size, other, arrived, size});
    }
  }
  return moves;
}

// Begin an alltoall or a permute. Each rank sends its rows straight to the ranks that need them.
void BetweenNodes::begin_rows(int64_t k, Channel& channel) {
  const auto moves = rows_between(k);
  exchange(k, channel, {{moves}}, [=] {
    gather(k);
    for (const Exchange::Move& move : moves) {
      if (move.from >= 0)
        store(k, operation_.kind == Kind::Alltoall ? move.from : 0, move.received);
    }
  });
}

// Take what the owners of this node have of a chunk.
void BetweenNodes::take(int64_t k) {
  if (operation_.kind == Kind::Bcast && topology_.node == root_node_) return gather(k);
  for (int owner = 0; owner < owners_; ++owner) {
    if (owner != me_) take_from(k, owner);
  }
}

// Copy what an owner has reduced, or gathered from other nodes, from its slot to this rank's
// arrays.
void BetweenNodes::take_from(int64_t k, int owner) {
  const Chunk& chunk = chunks_[k];
  const int64_t item = chunk.stream->item;
  each(chunk, share(chunk, owner), [&](const Array& a, int64_t column, int64_t n, int64_t from) {
    if (operation_.kind == Kind::Allgather) {
      for (int64_t row = 0; row < topology_.size; ++row) {
        copy_bytes(a.out + (row * a.pitch() + column) * item, at(k, owner, 1 + row, from),
                   n * item);
      }
    } else {
      const int64_t row = operation_.kind == Kind::ReduceScatter ? me_ : 0;
      copy_bytes(a.out + column * item, at(k, owner, row, from), n * item);
    }
  });
}

}  // namespace jaxmpi
