// The messages that a program has started and not yet waited for, and the thread that carries them
// out while the program computes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

#include "background_thread.h"

namespace jaxmpi {

// A program starts its messages in one order, the same on all ranks. They are carried out in that
// order, and waited for in it, so no two ranks wait for each other's later message. Once one has
// failed, those behind it are not begun: the other ranks do the same, or the job ends.
class CommunicationThread {
 public:
  using Memory = std::vector<const void*>;

  // Hand over a message. Until its wait returns, the memory belongs to the message.
  void start(std::function<void()> carry, Memory memory);

  // Wait until the oldest message that nobody has waited for is done. If it has failed, throw what
  // it threw, and forget those behind it. `memory` is where the program has its arrays now: XLA
  // must not have moved them.
  void wait(const Memory& memory);

  // Wait until no message is in progress or waiting for its turn. If one has failed, throw as
  // `wait`.
  void drain();

  // Drop all messages, once the one in progress has ended.
  void forget();

 private:
  struct Message {
    std::function<void()> carry;
    Memory memory;
    bool done = false;
    std::exception_ptr failure = {};
  };
  using Lock = std::unique_lock<std::mutex>;

  void run();
  void forget(Lock& lock);
  [[noreturn]] void fail(Lock& lock);

  std::mutex mutex_;
  std::condition_variable started_, ended_;
  std::deque<Message> messages_;    // that were started, and not waited for
  size_t begun_ = 0;                // how many of these the thread has begun
  bool carrying_ = false;           // whether the thread is inside a message
  std::exception_ptr failure_;      // of the first that failed
  std::atomic<int64_t> count_ = 0;  // messages_.size(), to be read without the mutex
  BackgroundThread thread_;
};

}  // namespace jaxmpi
