#include "communication_thread.h"

#include <stdexcept>
#include <utility>

namespace jaxmpi {

void CommunicationThread::start(std::function<void()> carry, Memory memory) {
  thread_.check();
  const Lock lock(mutex_);
  thread_.start([this] { run(); });
  messages_.push_back({std::move(carry), std::move(memory)});
  ++count_;
  started_.notify_one();
}

void CommunicationThread::run() {
  Lock lock(mutex_);
  for (;;) {
    started_.wait(lock, [this] { return begun_ < messages_.size() && !failure_; });
    // A reference to an element of a deque stays valid while others are added and removed at its
    // ends. This one stays: `wait` removes only what is done, and `forget` only what is not begun,
    // as long as `carrying_` is set.
    Message& message = messages_[begun_++];
    carrying_ = true;
    lock.unlock();
    try {
      message.carry();
    } catch (...) {
      message.failure = std::current_exception();
    }
    message.carry = {};  // which may free memory, so before the mutex is held again
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
  // Most programs start nothing: they do not take the mutex.
  if (count_ == 0 || thread_.forked()) return;
  Lock lock(mutex_);
  ended_.wait(lock, [this] { return failure_ || (!carrying_ && begun_ == messages_.size()); });
  if (failure_) fail(lock);
}

void CommunicationThread::forget() {
  if (count_ == 0 || thread_.forked()) return;
  Lock lock(mutex_);
  forget(lock);
}

void CommunicationThread::forget(Lock& lock) {
  // First what is not begun, so that nothing else begins while this waits.
  messages_.erase(messages_.begin() + begun_, messages_.end());
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
