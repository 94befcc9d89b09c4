#include "between.h"

#include <algorithm>
#include <cstring>

#include "patience.h"

namespace jaxmpi {
namespace {

constexpr int64_t kHotBytes = 8192;  // what has just been converted is still in the L1 cache
// Tags: of words; of chunks, which are numbered modulo kTagged; and of what is sent ahead, in which
// the disagreements are counted. What was sent ahead in a message that the ranks did not agree on
// is never received.
constexpr int kFirstTag = 1, kTag = 2, kTagged = 16384, kAheadTag = kTag + kTagged,
              kAheadTagged = 8192;

struct Words {
  int64_t smallest, largest;
};

int64_t rows_in_slot(Kind kind, int size) {
  switch (kind) {
    case Kind::ReduceScatter:
    case Kind::Alltoall: return size;
    case Kind::Allgather: return size + 1;  // its own, and what the owners have gathered
    default: return 1;
  }
}

char* room(std::vector<char>& buffer, int64_t bytes) {
  if (static_cast<int64_t>(buffer.size()) < bytes) buffer.resize(bytes);
  return buffer.data();
}

bool is_short_float(Type type) { return wide(type) != type; }

// total = total op x, for short floats x in float32.
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

BetweenNodes::BetweenNodes(const Place& place, const Node& node, Lanes& lanes,
                           const Operation& operation, std::vector<Array> arrays)
    : Call(place, node, operation, std::move(arrays), rows_in_slot(operation.kind, place.size)),
      lanes_(lanes) {
  nodes_ = at_.nodes();
  alone_ = at_.size == nodes_;
  direct_ = nodes_ <= lanes_.tuning.direct_nodes;
  if (operation_.kind == Kind::Bcast) root_node_ = at_.node_of(operation_.source, root_local_);
  if (operation_.kind == Kind::Allreduce && chunks_.size() == 1 && !operation_.bucket) {
    at_once_ =
        count(chunks_[0]) * size_of(wide(chunks_[0].stream->type)) <= lanes_.tuning.small_bytes;
  }
  if (at_once_) owners_ = 1;
  if (moves() && chunks_.size() == 1) {
    const int64_t messages = operation_.kind == Kind::Alltoall ? at_.size : 1;
    ahead_ = messages * bytes(chunks_[0]) <= lanes_.tuning.small_bytes;
  }
}

Node::Message BetweenNodes::message(int64_t word) {
  Node::Message message = {static_cast<int64_t>(chunks_.size()), word, {}, {}, {}};
  message.lay_out = [this](int64_t k) { write(k); };
  message.reduce = [this](int64_t k) { begin(k); };
  if (!moves()) message.take = [this](int64_t k) { take(k); };
  if (ahead_)
    message.send_ahead = [this] {
      lane(0).exchange.send_ahead(*lanes_.network, tag(0), rows_between(0));
    };
  message.give_up = [this] {
    if (ahead_) lane(0).exchange.give_up();
    ++lanes_.disagreements;
  };
  message.everywhere = [this](Extremes words) { return agree(words); };
  message.advance = [this] { return advance(); };
  message.is_reduced = [this](int64_t k) { return lane(k).done; };
  message.at_once = at_once_;
  return message;
}

// The first message of a node's first rank: the extremes of the words so far and, as long as they
// are equal, what is to be reduced if it is small.
Extremes BetweenNodes::agree(Extremes words) {
  Network& network = *lanes_.network;
  const int64_t most = sizeof(Words) + lanes_.tuning.small_bytes;
  int64_t wide_bytes = 0;
  room(lanes_.mine, most);
  room(lanes_.theirs, most);
  auto* mine = reinterpret_cast<Words*>(lanes_.mine.data());
  *mine = {words.smallest, words.largest};
  if (at_once_) {
    const Chunk& chunk = chunks_[0];
    const int64_t wide_item = size_of(wide(chunk.stream->type));
    wide_bytes = count(chunk) * wide_item;
    if (mine->smallest == mine->largest) {
      each(chunk, {0, count(chunk)}, [&](const Array& a, int64_t column, int64_t n, int64_t from) {
        combine(a.type, operation_.op, sources(0, 0, from, a.in + column * size_of(a.type)), local_,
                lanes_.mine.data() + sizeof(Words) + from * wide_item, n);
      });
    }
  }
  const auto what = operation_.beside ? Patience::For::kMessages : Patience::For::kShortMessage;
  for (const Round& round : recursive_doubling_schedule(nodes_, at_.node)) {
    for (const Transfer& transfer : round) {
      int pending = 0;
      if (transfer.from >= 0) {
        network.receive(peer(transfer.from), kFirstTag, lanes_.theirs.data(), most, pending);
      }
      if (transfer.to >= 0) {
        const int64_t bytes = mine->smallest == mine->largest ? wide_bytes : 0;
        network.send(peer(transfer.to), kFirstTag, lanes_.mine.data(), sizeof(Words) + bytes,
                     pending);
      }
      for (Patience patience(node_.layout().crowded, what); pending > 0;) {
        network.progress() ? patience.reset() : static_cast<void>(patience.pause());
      }
      if (transfer.from >= 0) merge(transfer, wide_bytes);
    }
  }
  if (at_once_ && mine->smallest == mine->largest) finish_small();
  return {mine->smallest, mine->largest};
}

// What has arrived, into what this node has so far; in the order of the nodes, or the bits of a NaN
// would differ.
void BetweenNodes::merge(const Transfer& transfer, int64_t wide_bytes) {
  auto* mine = reinterpret_cast<Words*>(lanes_.mine.data());
  const auto* theirs = reinterpret_cast<const Words*>(lanes_.theirs.data());
  *mine = {std::min(mine->smallest, theirs->smallest), std::max(mine->largest, theirs->largest)};
  if (mine->smallest != mine->largest || wide_bytes == 0) return;
  char *here = lanes_.mine.data() + sizeof(Words), *there = lanes_.theirs.data() + sizeof(Words);
  if (!transfer.reduces) {
    std::memcpy(here, there, wide_bytes);
    return;
  }
  const Type type = chunks_[0].stream->type;
  const bool first = at_.node < transfer.from;
  combine_wide(type, operation_.op, first ? here : there, first ? there : here, here,
               count(chunks_[0]));
}

void BetweenNodes::finish_small() {
  const Chunk& chunk = chunks_[0];
  const int64_t item = chunk.stream->item, wide_item = size_of(wide(chunk.stream->type));
  each(chunk, {0, count(chunk)}, [&](const Array& a, int64_t column, int64_t n, int64_t from) {
    char* out = a.out + column * item;
    finish(a.type, lanes_.mine.data() + sizeof(Words) + from * wide_item, operation_.divisor, out,
           n);
    if (local_ > 1) copy_bytes(at(0, me_, 0, from), out, n * item);
  });
}

void BetweenNodes::write(int64_t k) {
  if (operation_.kind != Kind::Bcast || operation_.source == at_.rank) lay_out(k, copy_bytes);
}

void BetweenNodes::begin(int64_t k) {
  Lane& lane = this->lane(k);
  begun_ = k + 1;
  lane.done = false;
  const Range mine = share(chunks_[k], me_);
  if (!moves() && (me_ >= owners_ || mine.count() == 0)) return exchange(k, lane, {}, {});
  if (reduces()) {
    const bool rounded = is_short_float(chunks_[k].stream->type) && (!alone_ || !direct_);
    before_ =
        rounded ? operation_.divisor : 1;  // or a sum of float16 might be too large to be sent
    after_ = rounded ? 1 : operation_.divisor;
  }
  switch (operation_.kind) {
    case Kind::Allreduce: return pairs() ? begin_pair(k, lane) : begin_reduce(k, lane);
    case Kind::ReduceScatter: return begin_reduce(k, lane);
    case Kind::Allgather: return begin_allgather(k, lane);
    case Kind::Bcast: return begin_bcast(k, lane);
    case Kind::Alltoall:
    case Kind::Permute: return begin_rows(k, lane);
  }
}

void BetweenNodes::exchange(int64_t k, Lane& lane, Stages stages, std::function<void()> end) {
  lane.exchange.begin(*lanes_.network, tag(k), std::move(stages), std::move(end));
  lane.done = lane.exchange.advance();
}

int BetweenNodes::tag(int64_t k) const {
  return ahead_ ? kAheadTag + lanes_.disagreements % kAheadTagged
                : kTag + node_.sequence(k) % kTagged;
}

bool BetweenNodes::advance() {
  bool moved = lanes_.network->progress();
  while (advanced_ < begun_ && lane(advanced_).done) ++advanced_;
  if (!moved) return false;
  for (int64_t k = advanced_; k < begun_; ++k) {
    Lane& lane = this->lane(k);
    if (!lane.done) lane.done = lane.exchange.advance();
  }
  return true;
}

// Where the block of each node begins, in items, counted from this node's; n items are for each
// rank, or for each block of an allreduce.
std::vector<int64_t> BetweenNodes::starts(int64_t n) const {
  std::vector<int64_t> starts = {0};
  for (int i = 0; i < nodes_; ++i) {
    const int64_t rows =
        operation_.kind == Kind::Allreduce ? 1 : at_.ranks[(at_.node + i) % nodes_];
    starts.push_back(starts.back() + rows * n);
  }
  return starts;
}

// What the ranks of this node have of a row, reduced and rounded.
void BetweenNodes::partial(int64_t k, Range part, int64_t row, char* to) {
  const int64_t item = chunks_[k].stream->item;
  each(chunks_[k], part, [&](const Array& a, int64_t column, int64_t n, int64_t from) {
    const char* own = a.in + (row * a.pitch() + column) * item;
    char* out = to + (from - part.begin) * item;
    if (local_ == 1 && before_ == 1) return copy_bytes(out, own, n * item);
    reduce(a.type, operation_.op, sources(k, row, from, own), local_, before_, out, nullptr, n);
  });
}

// Two nodes send each other everything: as many bytes as halves there and back, in one message.
void BetweenNodes::begin_pair(int64_t k, Lane& lane) {
  const Range mine = share(chunks_[k], me_);
  const Type type = chunks_[k].stream->type;
  const int64_t item = size_of(type), size = mine.count() * item;
  const int other = 1 - at_.node;
  char *here = room(lane.partial, size), *there = room(lane.arrived, size);
  partial(k, mine, 0, here);
  Stages stages(1);
  stages[0].moves.push_back({peer(other), here, size, peer(other), there, size});
  exchange(k, lane, std::move(stages), [=, divisor = after_] {
    each(chunks_[k], mine, [&](const Array& a, int64_t column, int64_t n, int64_t from) {
      const int64_t offset = (from - mine.begin) * item;
      const void* both[2];
      both[at_.node] = here + offset;
      both[other] = there + offset;
      reduce(type, operation_.op, both, 2, divisor, a.out + column * item,
             local_ > 1 ? at(k, me_, 0, from) : nullptr, n);
    });
  });
}

void BetweenNodes::begin_reduce(int64_t k, Lane& lane) {
  const Chunk& chunk = chunks_[k];
  const Range mine = share(chunk, me_);
  const Type type = chunk.stream->type;
  const int64_t item = chunk.stream->item, n = mine.count();
  const bool whole = operation_.kind == Kind::Allreduce;
  const int64_t block = (n + nodes_ - 1) / nodes_;
  const std::vector<int64_t> starts = this->starts(whole ? block : n);
  char* parts = room(lane.partial, starts.back() * item);
  for (int i = 0; i < nodes_; ++i) {
    const int theirs = (at_.node + i) % nodes_;
    char* to = parts + starts[i] * item;
    if (whole) {
      const int64_t begin = std::min(mine.begin + theirs * block, mine.end),
                    end = std::min(begin + block, mine.end);
      partial(k, {begin, end}, 0, to);
    } else {
      for (int rank = 0; rank < at_.ranks[theirs]; ++rank) {
        partial(k, mine, at_.order[at_.firsts[theirs] + rank], to + rank * n * item);
      }
    }
  }
  Stages stages;
  char* reduced = room(lane.reduced, (whole ? starts.back() : starts[1]) * item);
  direct_ ? add_direct(stages, lane, type, starts) : add_rounds(stages, lane, type, starts);
  if (!whole) {
    return exchange(k, lane, std::move(stages), [=] {
      for (int rank = 0; rank < local_; ++rank)
        copy_bytes(at(k, me_, rank, mine.begin), reduced + rank * n * item, n * item);
      take_from(k, me_);
    });
  }
  add_allgather(stages, reduced, item, starts);
  exchange(k, lane, std::move(stages), [=] {
    for (int i = 0; i < nodes_; ++i) {
      const int theirs = (at_.node + i) % nodes_;
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

// The parts of the other nodes come each in a message, and are reduced in the order of the nodes
// once all are there.
void BetweenNodes::add_direct(Stages& stages, Lane& lane, Type type,
                              const std::vector<int64_t>& starts) {
  const int64_t item = size_of(type), n = starts[1];
  const char* parts = lane.partial.data();
  char *arrived = room(lane.arrived, (nodes_ - 1) * n * item), *reduced = lane.reduced.data();
  Exchange::Stage stage;
  std::vector<const void*> all(nodes_);
  all[at_.node] = parts;
  for (const Round& round : reduce_scatter_schedule(nodes_, at_.node, direct_)) {
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

// Sums on the way are float32 for short floats, and rounded where they are sent.
void BetweenNodes::add_rounds(Stages& stages, Lane& lane, Type type,
                              const std::vector<int64_t>& starts) {
  const Op op = operation_.op;
  const int64_t item = size_of(type), wide_item = size_of(wide(type)), n = starts.back();
  const bool rounds = is_short_float(type);
  char* totals = lane.partial.data();
  char* sent = totals;
  if (rounds) {
    const void* source = lane.partial.data();
    totals = room(lane.totals, n * wide_item);
    combine(type, op, &source, 1, totals, n);
  }
  char *arrived = room(lane.arrived, n * item), *reduced = lane.reduced.data();
  for (const Round& round : reduce_scatter_schedule(nodes_, at_.node, direct_)) {
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
  const int divisor = after_;
  auto last = stages.back().after;
  stages.back().after = [=, n = starts[1]] {
    last();
    finish(type, totals, divisor, reduced, n);
  };
}

void BetweenNodes::add_allgather(Stages& stages, char* blocks, int64_t item,
                                 const std::vector<int64_t>& starts) {
  for (const Round& round : allgather_schedule(nodes_, at_.node, direct_)) {
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

void BetweenNodes::begin_allgather(int64_t k, Lane& lane) {
  const Range mine = share(chunks_[k], me_);
  const int64_t item = chunks_[k].stream->item, n = mine.count();
  const std::vector<int64_t> starts = this->starts(n);
  char* blocks = room(lane.reduced, starts.back() * item);
  for (int rank = 0; rank < local_; ++rank)
    copy_bytes(blocks + rank * n * item, at(k, rank, 0, mine.begin), n * item);
  Stages stages;
  add_allgather(stages, blocks, item, starts);
  exchange(k, lane, std::move(stages), [=] {
    for (int i = 0; i < nodes_; ++i) {
      const int theirs = (at_.node + i) % nodes_;
      for (int rank = 0; rank < at_.ranks[theirs]; ++rank) {
        const int row = at_.order[at_.firsts[theirs] + rank];
        copy_bytes(at(k, me_, 1 + row, mine.begin), blocks + (starts[i] + rank * n) * item,
                   n * item);
      }
    }
    take_from(k, me_);
  });
}

// Along a tree, from the slot of the root to those of the owners.
void BetweenNodes::begin_bcast(int64_t k, Lane& lane) {
  const Range mine = share(chunks_[k], me_);
  const int64_t size = mine.count() * chunks_[k].stream->item;
  char* memory = at(k, at_.node == root_node_ ? root_local_ : me_, 0, mine.begin);
  Stages stages;
  for (const Round& round : broadcast_schedule(nodes_, at_.node, root_node_)) {
    Exchange::Stage stage;
    for (const Transfer& t : round) {
      stage.moves.push_back(
          {t.to < 0 ? -1 : peer(t.to), memory, size, t.from < 0 ? -1 : peer(t.from), memory, size});
    }
    stages.push_back(std::move(stage));
  }
  exchange(k, lane, std::move(stages), [=] {
    if (at_.node != root_node_) take_from(k, me_);
  });
}

// What ranks of other nodes send to this one and it to them: in an alltoall, from its slot, its row
// to each rank; in a permute, its one row to one rank.
std::vector<Exchange::Move> BetweenNodes::rows_between(int64_t k) {
  const int64_t size = bytes(chunks_[k]);
  if (operation_.kind == Kind::Permute) {
    int local = 0;
    auto elsewhere = [&](int rank) {
      return rank >= 0 && at_.node_of(rank, local) != at_.node ? rank : -1;
    };
    char* arrived = room(lane(k).arrived, size);
    return {{elsewhere(operation_.dest), at(k, me_, 0, 0), size, elsewhere(operation_.source),
             arrived, size}};
  }
  std::vector<Exchange::Move> moves;
  char* arrived = room(lane(k).arrived, (at_.size - local_) * size);
  for (int i = 1; i < nodes_; ++i) {
    const int theirs = (at_.node + i) % nodes_;
    for (int rank = 0; rank < at_.ranks[theirs]; ++rank, arrived += size) {
      const int other = at_.order[at_.firsts[theirs] + rank];
      moves.push_back({other, at(k, me_, other, 0), size, other, arrived, size});
    }
  }
  return moves;
}

void BetweenNodes::begin_rows(int64_t k, Lane& lane) {
  const auto moves = rows_between(k);
  exchange(k, lane, {{moves}}, [=] {
    gather(k);
    for (const Exchange::Move& move : moves) {
      if (move.from >= 0)
        store(k, operation_.kind == Kind::Alltoall ? move.from : 0, move.received);
    }
  });
}

void BetweenNodes::take(int64_t k) {
  if (operation_.kind == Kind::Bcast && at_.node == root_node_) return gather(k);
  for (int owner = 0; owner < owners_; ++owner) {
    if (owner != me_) take_from(k, owner);
  }
}

// What an owner has reduced, or gathered from other nodes, from its slot.
void BetweenNodes::take_from(int64_t k, int owner) {
  const Chunk& chunk = chunks_[k];
  const int64_t item = chunk.stream->item;
  each(chunk, share(chunk, owner), [&](const Array& a, int64_t column, int64_t n, int64_t from) {
    if (operation_.kind == Kind::Allgather) {
      for (int64_t row = 0; row < at_.size; ++row) {
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
