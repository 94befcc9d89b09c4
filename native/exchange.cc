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
  while (stage_ < stages_.size() && receiving_[stage_] == 0) {
    if (stages_[stage_].after) stages_[stage_].after();
    ++stage_;
    send();
  }
  if (stage_ < stages_.size() || sending_ > 0) return false;
  if (end_) std::exchange(end_, nullptr)();
  return true;
}

}  // namespace jaxmpi
