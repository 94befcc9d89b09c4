#include "crew.h"

#include <unistd.h>

#include <stdexcept>
#include <utility>

#include "patience.h"

namespace jaxmpi {
namespace {

constexpr auto kSpinning = std::chrono::microseconds(100);  // a thread that sleeps comes some 50 µs late

// Returns whether `until` came true while it was worth to spin.
template <class Until>
bool spin(Until until) {
  const auto start = Patience::Clock::now();
  do {
    for (int i = 0; i < 64; ++i) {
      if (until()) return true;
      Patience::relax();
    }
  } while (Patience::Clock::now() - start < kSpinning);
  return false;
}

}  // namespace

bool Crew::forked() const { return threads_of_ != 0 && threads_of_ != getpid(); }

Crew::~Crew() {
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

void Crew::start(int count, std::function<void(int)> work) {
  if (forked()) throw std::runtime_error("this process is a forked child of a rank, and cannot communicate");
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    threads_of_ = getpid();
    work_ = std::move(work);
    count_ = count;
    left_ = count;
    ++turn_;
  }
  begun_.notify_all();
  while (static_cast<int>(threads_.size()) < count) {
    const int number = static_cast<int>(threads_.size()) + 1;
    threads_.emplace_back([this, number] { live(number); });
  }
}

void Crew::wait() {
  const auto idle = [this] { return left_ == 0; };
  std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
  spin(idle);
  lock.lock();
  done_.wait(lock, idle);
  work_ = {};
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void Crew::live(int number) {
  uint64_t turn = 0;  // the last one that it has seen
  for (;;) {
    const auto next = [&] { return turn_ != turn; };
    spin(next);
    std::unique_lock<std::mutex> lock(mutex_);
    begun_.wait(lock, next);
    turn = turn_;
    if (ends_) return;
    if (number > count_ || left_ == 0) continue;
    const auto& work = work_;
    lock.unlock();
    std::exception_ptr failure;
    try {
      work(number);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    if (failure && !failure_) failure_ = failure;
    if (--left_ == 0) done_.notify_all();
  }
}

}  // namespace jaxmpi
