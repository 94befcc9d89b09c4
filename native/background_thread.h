// A thread that carries messages beside the program.
#pragma once

#include <unistd.h>

#include <atomic>
#include <functional>
#include <stdexcept>
#include <thread>
#include <utility>

namespace jaxmpi {

// Starts once, and runs until the process ends. A forked child of the process has its memory and
// not the thread: it cannot communicate, and must neither wait for the thread nor take a mutex that
// the thread may have held at the fork, because nobody would release it.
class BackgroundThread {
 public:
  bool forked() const { return pid_ != 0 && pid_ != getpid(); }

  // Throw in a forked child.
  void check() const {
    if (forked())
      throw std::runtime_error("this process is a forked child of a rank, and cannot communicate");
  }

  // Start it, unless it runs; one caller at a time.
  void start(std::function<void()> run) {
    if (pid_ != 0) return;
    std::thread(std::move(run)).detach();
    pid_ = getpid();
  }

 private:
  std::atomic<pid_t> pid_ = 0;  // of the process that has the thread; 0: none yet
};

}  // namespace jaxmpi
