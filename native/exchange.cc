#include "exchange.h"

#include <utility>

namespace jaxmpi {

void Exchange::begin(Network& network, int tag, std::vector<Stage> stages,
                     std::function<void()> end) {
  network_ = &network;
  tag_ = tag;
  stages_ = std::move(stages);
  end_ = std::move(end);
  stage_ = 0;
  // The receives of all stages are posted now: what arrives early is stored where it belongs, and
  // is not copied from a buffer of MPI later. MPI matches messages of one tag between two ranks in
  // the order in which they were sent, which is the order of the stages.
  receiving_.assign(stages_.size(), 0);
  for (size_t i = 0; i < stages_.size(); ++i) {
    for (const Move& move : stages_[i].moves) {
      if (move.from >= 0)
        network.receive(move.from, tag, move.received, move.received_bytes, receiving_[i]);
    }
  }
  if (!std::exchange(sent_ahead_, false)) send();
}

void Exchange::send_ahead(Network& network, int tag, const std::vector<Move>& moves) {
  network_ = &network;
  tag_ = tag;
  sent_ahead_ = true;
  send(moves);
}

// MPI still sends what was sent ahead, from the slot; the exchange does not wait for it. Nobody
// receives it, because the next message sent ahead has another tag.
void Exchange::give_up() {
  if (std::exchange(sent_ahead_, false)) network_->forget(sending_);
}

void Exchange::send() {
  if (stage_ == stages_.size()) return;
  const Stage& stage = stages_[stage_];
  if (stage.before) stage.before();
  send(stage.moves);
}

void Exchange::send(const std::vector<Move>& moves) {
  for (const Move& move : moves) {
    if (move.to >= 0) network_->send(move.to, tag_, move.sent, move.sent_bytes, sending_);
  }
}

bool Exchange::advance() {
  // A stage ends when all of it has been received; its sends may still be in progress. The next one
  // may write only to memory that no earlier send reads.
  while (stage_ < stages_.size() && receiving_[stage_] == 0) {
    if (stages_[stage_].after) stages_[stage_].after();
    ++stage_;
    send();
  }
  // The buffers are free for another chunk once MPI has read all of them.
  if (stage_ < stages_.size() || sending_ > 0) return false;
  if (end_) std::exchange(end_, nullptr)();
  return true;
}

}  // namespace jaxmpi
