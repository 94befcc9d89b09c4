// Threads of a rank that share the work of a message.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace jaxmpi {

class WorkerThreads {
 public:
  // The threads are made here, before any message: a rank that had none in the middle of one would
  // keep all others waiting.
  explicit WorkerThreads(int count);
  ~WorkerThreads();
  WorkerThreads(const WorkerThreads&) = delete;
  WorkerThreads& operator=(const WorkerThreads&) = delete;

  int count() const { return static_cast<int>(threads_.size()); }

  // Throws in a forked child, which has none of the threads.
  void check() const;

  // Has work(1), ..., work(count) done, each by a thread of its own, until `wait` returns.
  void start(std::function<void(int)> work);

  // Returns when all is done, or was never begun; throws the first of what `work` has thrown.
  void wait();

 private:
  void run(int number);
  bool forked() const;

  std::mutex mutex_;
  std::condition_variable begun_, done_;
  std::vector<std::thread> threads_;
  const pid_t threads_of_;         // the process
  std::function<void(int)> work_;  // of this turn
  bool ends_ = false;
  std::exception_ptr failure_;
  std::atomic<uint64_t> turn_ = 0;  // counted from the beginning
  std::atomic<int> left_ = 0;       // of those at work
};

}  // namespace jaxmpi
