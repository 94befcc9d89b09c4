// One chunk on its way between the nodes.
#pragma once

#include <functional>
#include <vector>

#include "internode.h"

namespace jaxmpi {

class Exchange {
 public:
  struct Move {  // ranks of the job; -1: nobody
    int to;
    const char* sent;
    int64_t sent_bytes;
    int from;
    char* received;
    int64_t received_bytes;
  };
  struct Stage {
    std::vector<Move> moves;
    std::function<void()>
        before = {},
        after = {};  // makes what is sent; does with what was received what is to be done
  };

  // Sends what a first stage will send, before it is known whether that will begin: `begin` does
  // not send it again.
  void send_ahead(Network& network, int tag, const std::vector<Move>& moves);

  // The stage of what was sent ahead will not begin.
  void give_up();

  // Begins the first stage, and is ready to receive what belongs to all of them. `end` is called
  // after the last. One tag is enough: MPI keeps the order of the messages from one rank to
  // another.
  void begin(Network& network, int tag, std::vector<Stage> stages, std::function<void()> end);

  // Begins what can be begun by now; returns whether all is done.
  bool advance();

 private:
  void send();
  void send(const std::vector<Move>& moves);

  Network* network_ = nullptr;
  int tag_ = 0;
  std::vector<Stage> stages_;
  std::function<void()> end_;
  size_t stage_ = 0;
  int sending_ = 0;
  bool sent_ahead_ = false;
  std::vector<int> receiving_;  // messages of each stage
};

}  // namespace jaxmpi
