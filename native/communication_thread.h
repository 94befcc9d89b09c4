// A thread that carries messages out while the program still computes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

namespace jaxmpi {

// A program starts its messages in one order, the same on all ranks; they are carried out in that
// order, and waited for in it. Once one has failed, those behind it are not begun: the other ranks
// do the same, or the job ends.
class CommunicationThread {
 public:
  using Memory = std::vector<const void*>;

  // Hands over a message. From here to its wait, the memory is the message's.
  void start(std::function<void()> carry, Memory memory);

  // Returns when the oldest message that nobody has waited for is done. If it has failed, throws
  // what it has thrown, and forgets those behind it. `memory` is where the program has it now: it
  // must not have been moved.
  void wait(const Memory& memory);

  // Returns when nothing is on its way. If a message has failed, throws as `wait` does.
  void drain();

  // Forgets all messages, when the one that is on its way has ended.
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
  bool forked() const;

  std::mutex mutex_;
  std::condition_variable started_, ended_;
  std::deque<Message> messages_;  // that were started, and not waited for
  size_t begun_ = 0;              // of these
  bool carrying_ = false;
  std::exception_ptr failure_;      // of the first that failed
  std::atomic<int64_t> count_ = 0;  // of messages_, to look at without the mutex
  std::atomic<int> thread_of_ = 0;  // the process that has the thread; 0: none yet
};

}  // namespace jaxmpi
