// Messages that a program sends in one call and takes in a later one, or never.
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

#include "background_thread.h"
#include "call.h"

namespace jaxmpi {

// Each has memory of its own, and a number that is the same on all ranks. A thread carries them out
// one after the other, while the program and the communication thread carry messages of other
// transports: such a message may take as long as many steps, and must not hold up theirs.
//
// Messages of one transport stay in the order of the program on all ranks. Whoever sends one first
// waits until those before it are done: a message at once and a start for those sent ahead on the
// same transport (`drain`), a message sent ahead for all that were started
// (`CommunicationThread::drain`). Nobody waits for a later message, so there is no deadlock: the
// earliest unfinished message of the job is begun by each of its ranks.
class MessagesAhead {
 public:
  // Carries out the collective on these arrays.
  using Carry = std::function<void(std::vector<Array>)>;

  // Set the number of the first message: the same on all ranks, and another one in each job.
  void count_from(int64_t first);

  // Send copies of the arrays' `in`, and return the number of the message. Each result has `rows`
  // rows as large as the array. Throws as `drain` does.
  int64_t start(size_t transport, const std::vector<Array>& arrays, int64_t rows, Carry carry);

  // Wait for a message and copy its results to the arrays' `out`. Return false where there is none
  // of this number: then there is none on the other ranks either. Throw what the message threw.
  bool take(int64_t number, const std::vector<Array>& arrays);

  // Wait until no message of a transport is in progress or waiting for its turn. Throw what a
  // message threw that nobody has taken.
  void drain(size_t transport);

  // Throw it now, without waiting: the other ranks have failed in the same message.
  void raise();

  // Drop all messages, once the one in progress has ended.
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

  std::mutex mutex_;
  std::condition_variable started_, ended_;
  std::map<int64_t, std::shared_ptr<Message>> messages_;  // sent and not taken, by number
  std::deque<std::shared_ptr<Message>> queue_;            // not done; the thread carries the first
  bool carrying_ = false;
  std::atomic<bool> failed_ = false;  // whether one of messages_ has, to be read without the mutex
  int64_t next_ = 1;
  BackgroundThread thread_;
};

}  // namespace jaxmpi
