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
  // Make the threads, before any message: a rank that could make none in the middle of a message
  // would keep all others waiting.
  explicit WorkerThreads(int count);
  ~WorkerThreads();
  WorkerThreads(const WorkerThreads&) = delete;
  WorkerThreads& operator=(const WorkerThreads&) = delete;

  int count() const { return static_cast<int>(threads_.size()); }

  // Throw in a forked child, which has none of the threads.
  void check() const;

  // Begin work(1), ..., work(count), each on a thread of its own.
  void start(std::function<void(int)> work);

  // Wait until all of it is done; throw the first exception that `work` threw.
  void wait();

 private:
  void run(int number);
  bool forked() const;

  std::mutex mutex_;
  std::condition_variable begun_, done_;
  std::vector<std::thread> threads_;
  const pid_t threads_of_;         // the pid of the process that has them
  std::function<void(int)> work_;  // of this turn
  bool ends_ = false;
  std::exception_ptr failure_;
  std::atomic<uint64_t> turn_ = 0;  // how many times `start` was called
  std::atomic<int> left_ = 0;       // threads still at work in this turn
};

}  // namespace jaxmpi
