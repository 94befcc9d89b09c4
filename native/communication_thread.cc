#include "communication_thread.h"

#include <unistd.h>

#include <stdexcept>
#include <thread>
#include <utility>

namespace jaxmpi {

// A forked child has what was in memory, and no thread: it cannot talk to the other ranks, and must
// not wait for any.
bool CommunicationThread::forked() const { return thread_of_ != 0 && thread_of_ != getpid(); }

void CommunicationThread::start(std::function<void()> carry, Memory memory) {
  if (forked())
    throw std::runtime_error("this process is a forked child of a rank, and cannot communicate");
  const Lock lock(mutex_);
  if (thread_of_ == 0) {
    std::thread([this] { run(); }).detach();
    thread_of_ = getpid();
  }
  messages_.push_back({std::move(carry), std::move(memory)});
  ++count_;
  started_.notify_one();
}

void CommunicationThread::run() {
  Lock lock(mutex_);
  for (;;) {
    started_.wait(lock, [this] { return begun_ < messages_.size() && !failure_; });
    Message& message = messages_[begun_++];  // references to the elements of a deque outlive what
                                             // is done at its ends
    carrying_ = true;
    lock.unlock();
    try {
      message.carry();
    } catch (...) {
      message.failure = std::current_exception();
    }
    message.carry = {};
    lock.lock();
    carrying_ = false;
    message.done = true;
    failure_ = message.failure;
    ended_.notify_all();
  }
}

void CommunicationThread::wait(const Memory& memory) {
  Lock lock(mutex_);
  if (messages_.empty())
    throw std::logic_error("a program waits for a message that it has not started");
  ended_.wait(lock, [this] { return messages_.front().done; });
  if (messages_.front().failure) fail(lock);
  const bool moved = messages_.front().memory != memory;
  messages_.pop_front();
  --begun_;
  --count_;
  if (moved) {
    forget(lock);
    throw std::logic_error(
        "XLA has moved an array while it was on its way. Set JAXMPI_OVERLAP=0, and report it to "
        "jaxmpi");
  }
}

void CommunicationThread::drain() {
  if (count_ == 0 || forked()) return;
  Lock lock(mutex_);
  ended_.wait(lock, [this] { return failure_ || (!carrying_ && begun_ == messages_.size()); });
  if (failure_) fail(lock);
}

void CommunicationThread::forget() {
  if (count_ == 0 || forked()) return;
  Lock lock(mutex_);
  forget(lock);
}

void CommunicationThread::forget(Lock& lock) {
  messages_.erase(messages_.begin() + begun_,
                  messages_.end());  // nothing behind the one that is on its way begins any more
  ended_.wait(lock, [this] { return !carrying_; });
  messages_.clear();
  begun_ = 0;
  count_ = 0;
  failure_ = nullptr;
}

void CommunicationThread::fail(Lock& lock) {
  const std::exception_ptr failure = failure_;
  forget(lock);
  std::rethrow_exception(failure);
}

}  // namespace jaxmpi
