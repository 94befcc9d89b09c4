#include "worker_threads.h"

#include <unistd.h>

#include <stdexcept>
#include <utility>

#include "backoff.h"

namespace jaxmpi {
namespace {

// A thread that sleeps wakes up some 50 µs late, so it spins for the next turn first.
constexpr auto kSpinning = std::chrono::microseconds(100);

template <class Until>
void spin(Until until) {
  const auto start = Backoff::Clock::now();
  do {
    for (int i = 0; i < 64; ++i) {
      if (until()) return;
      Backoff::relax();
    }
  } while (Backoff::Clock::now() - start < kSpinning);
}

}  // namespace

WorkerThreads::WorkerThreads(int count) : threads_of_(getpid()) {
  for (int number = 1; number <= count; ++number) {
    threads_.emplace_back([this, number] { run(number); });
  }
}

bool WorkerThreads::forked() const { return threads_of_ != getpid(); }

void WorkerThreads::check() const {
  if (forked())
    throw std::runtime_error("this process is a forked child of a rank, and cannot communicate");
}

WorkerThreads::~WorkerThreads() {
  if (forked()) {
    for (std::thread& thread : threads_) thread.detach();
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
    ++turn_;
  }
  begun_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerThreads::start(std::function<void(int)> work) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    work_ = std::move(work);
    left_ = count();
    ++turn_;
  }
  begun_.notify_all();
}

void WorkerThreads::wait() {
  const auto idle = [this] { return left_ == 0; };
  spin(idle);
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, idle);
  work_ = {};
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void WorkerThreads::run(int number) {
  uint64_t turn = 0;  // the last turn that this thread has seen
  for (;;) {
    const auto next = [&] { return turn_ != turn; };
    spin(next);
    std::unique_lock<std::mutex> lock(mutex_);
    begun_.wait(lock, next);
    turn = turn_;
    if (ends_) return;
    lock.unlock();
    std::exception_ptr failure;
    try {
      work_(number);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    if (failure && !failure_) failure_ = failure;
    if (--left_ == 0) done_.notify_all();
  }
}

}  // namespace jaxmpi
