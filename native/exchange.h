// The exchange of one chunk between the nodes: stages of MPI messages, each after the one before.
#pragma once

#include <functional>
#include <vector>

#include "internode.h"

namespace jaxmpi {

class Exchange {
 public:
  // One message in each direction. Ranks are those of the communicator; -1: no message.
  struct Move {
    int to;
    const char* sent;
    int64_t sent_bytes;
    int from;
    char* received;
    int64_t received_bytes;
  };
  struct Stage {
    std::vector<Move> moves;
    std::function<void()> before = {};  // fills the send buffers
    std::function<void()> after = {};   // consumes the receive buffers
  };

  // Send what the first stage will send, before it is known whether the exchange will begin.
  // `begin` then does not send it again.
  void send_ahead(Network& network, int tag, const std::vector<Move>& moves);

  // The exchange of what was sent ahead will not begin.
  void give_up();

  // Post the receives of all stages and begin the first one. `end` is called after the last. One
  // tag is enough, because MPI keeps the order of the messages from one rank to another.
  void begin(Network& network, int tag, std::vector<Stage> stages, std::function<void()> end);

  // Begin the stages that can begin by now; return whether all are done.
  bool advance();

 private:
  void send();
  void send(const std::vector<Move>& moves);

  Network* network_ = nullptr;
  int tag_ = 0;
  std::vector<Stage> stages_;
  std::function<void()> end_;
  size_t stage_ = 0;
  int sending_ = 0;  // messages of all stages
  bool sent_ahead_ = false;
  std::vector<int> receiving_;  // messages of each stage
};

}  // namespace jaxmpi
