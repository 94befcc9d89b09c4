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

class Crew {
 public:
  Crew() = default;
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  // Has work(1), ..., work(count) done, each by a thread of its own, until `wait` returns.
  void start(int count, std::function<void(int)> work);

  // Returns when all is done, or was never begun; throws the first of what `work` has thrown.
  void wait();

 private:
  void live(int number);
  bool forked() const;

  std::mutex mutex_;
  std::condition_variable begun_, done_;
  std::vector<std::thread> threads_;
  pid_t threads_of_ = 0;           // the process: a forked child has none of them
  std::function<void(int)> work_;  // of this turn
  int count_ = 0;
  bool ends_ = false;
  std::exception_ptr failure_;
  std::atomic<uint64_t> turn_ = 0;  // counted from the beginning
  std::atomic<int> left_ = 0;       // of those at work
};

}  // namespace jaxmpi
