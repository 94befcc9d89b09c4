// Messages that a program starts in one call and takes in a later one, or never.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "call.h"

namespace jaxmpi {

// Each has memory of its own, and a number that is the same on all ranks. A thread carries them out
// one after the other, beside the messages of other transports.
class MessagesAhead {
 public:
  // Carries out a collective on arrays, as message `number` of a transport.
  using Carry = std::function<void(std::vector<Array>)>;

  // The number of the first message: the same on all ranks, and another one in each job.
  void count_from(int64_t first);

  // Copies the arrays' `in`, and returns the number of the message. Throws as `drain` does. `rows`:
  // of each result, as large as the array.
  int64_t start(size_t transport, const std::vector<Array>& arrays, int64_t rows, Carry carry);

  // Waits for a message and copies what it has brought to the arrays' `out`. False where there is
  // none of this number (any more): then there is none on the other ranks either. Throws what it
  // has thrown.
  bool take(int64_t number, const std::vector<Array>& arrays);

  // Returns when no message of a transport is on its way. Throws what one has thrown that nobody
  // has taken.
  void drain(size_t transport);

  // Throws it now: the other ranks have been told, and wait for this one.
  void raise();

  // Forgets all messages, when the one that is on its way has ended.
  void forget();

 private:
  struct Message {
    size_t transport;
    int64_t rows;
    std::vector<Array> arrays;
    std::unique_ptr<char, void (*)(void*)> memory;
    Carry carry;
    bool done = false;
    std::exception_ptr failure = {};
  };
  using Lock = std::unique_lock<std::mutex>;

  void run();
  void raise(Lock& lock);
  void forget(Lock& lock);
  bool forked() const;

  std::mutex mutex_;
  std::condition_variable started_, ended_;
  std::map<int64_t, std::shared_ptr<Message>> messages_;  // that were started, and not taken
  std::deque<std::shared_ptr<Message>> queue_;  // that are not done; the thread is at the first
  bool carrying_ = false;
  std::atomic<bool> failed_ = false;  // one of messages_, to look at without the mutex
  int64_t next_ = 1;
  std::atomic<int> thread_of_ = 0;  // the process that has the thread; 0: none yet
};

}  // namespace jaxmpi
