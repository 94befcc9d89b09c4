#include "messages_ahead.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>
#include <stdexcept>
#include <utility>

namespace jaxmpi {
namespace {

// Messages that are kept until a program takes them. A program that ends without its last results
// takes some of them never.
constexpr size_t kMost = 64;
constexpr int64_t kAlign = 64;  // bytes

int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

}  // namespace

void MessagesAhead::count_from(int64_t first) {
  const Lock lock(mutex_);
  next_ = first;
}

int64_t MessagesAhead::start(size_t transport, const std::vector<Array>& arrays, int64_t rows,
                             Carry carry) {
  thread_.check();
  // The program may reuse its arrays at once, so the message has copies: for each array its
  // operand, then its result, in one block of memory.
  int64_t bytes = 0;
  for (const Array& array : arrays) bytes += aligned(array.bytes()) + aligned(rows * array.bytes());
  auto message = std::make_shared<Message>(
      Message{transport,
              rows,
              arrays,
              {static_cast<char*>(std::aligned_alloc(kAlign, std::max(bytes, kAlign))), std::free},
              {}});
  if (!message->memory) throw std::bad_alloc();
  char* at = message->memory.get();
  for (Array& array : message->arrays) {
    std::memcpy(at, array.in, array.bytes());
    array.in = at;
    array.out = at + aligned(array.bytes());
    at = array.out + aligned(rows * array.bytes());
  }
  message->carry = std::move(carry);

  Lock lock(mutex_);
  raise(lock);
  thread_.start([this] { run(); });
  // All ranks drop the same message, because all have sent the same ones: either all find it when
  // they take its number, or none does.
  while (messages_.size() >= kMost) {
    const auto oldest = messages_.begin()->second;
    ended_.wait(lock, [&] { return oldest->done; });
    raise(lock);
    messages_.erase(messages_.begin());
  }
  messages_[next_] = message;
  queue_.push_back(std::move(message));
  started_.notify_one();
  return next_++;
}

void MessagesAhead::run() {
  Lock lock(mutex_);
  for (;;) {
    started_.wait(lock, [this] { return !queue_.empty(); });
    // It stays in the queue until it is done: `drain` waits for what is in the queue.
    const auto message = queue_.front();
    carrying_ = true;
    lock.unlock();
    std::exception_ptr failure;
    try {
      message->carry(message->arrays);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    carrying_ = false;
    message->carry = {};
    message->failure = failure;
    message->done = true;
    queue_.pop_front();
    // Those behind a message that failed are not begun on any rank, so a take finds no such number.
    if (failure) {
      failed_ = true;
      for (auto it = messages_.begin(); it != messages_.end();)
        it = it->second->done ? std::next(it) : messages_.erase(it);
      // A `take` may already wait for one of them.
      for (const auto& behind : queue_) {
        behind->failure = failure;
        behind->done = true;
      }
      queue_.clear();
    }
    ended_.notify_all();
  }
}

bool MessagesAhead::take(int64_t number, const std::vector<Array>& arrays) {
  if (thread_.forked()) return false;
  Lock lock(mutex_);
  const auto found = messages_.find(number);
  if (found == messages_.end()) return false;
  const auto message = found->second;
  // Erased before the wait, so that nobody takes it twice.
  messages_.erase(found);
  ended_.wait(lock, [&] { return message->done; });
  lock.unlock();  // the message is this call's alone: copy without the mutex
  if (message->failure) std::rethrow_exception(message->failure);
  if (message->arrays.size() != arrays.size())
    throw std::logic_error("a message of other arrays than those that take it");
  for (size_t i = 0; i < arrays.size(); ++i) {
    const Array &mine = message->arrays[i], &to = arrays[i];
    if (mine.type != to.type || mine.columns != to.columns) {
      throw std::logic_error("a message of other arrays than those that take it");
    }
    std::memcpy(to.out, mine.out, message->rows * mine.bytes());
  }
  return true;
}

void MessagesAhead::drain(size_t transport) {
  if (thread_.forked()) return;
  Lock lock(mutex_);
  ended_.wait(lock, [&] {
    for (const auto& message : queue_) {
      if (message->transport == transport) return false;
    }
    return true;
  });
  raise(lock);
}

void MessagesAhead::raise() {
  // Called for each program, so without the mutex unless something has failed.
  if (thread_.forked() || !failed_) return;
  Lock lock(mutex_);
  raise(lock);
}

void MessagesAhead::raise(Lock&) {
  if (!failed_) return;
  // The first failure is thrown, once; the messages that failed are dropped.
  std::exception_ptr failure;
  for (auto it = messages_.begin(); it != messages_.end();) {
    if (!failure) failure = it->second->failure;
    it = it->second->failure ? messages_.erase(it) : std::next(it);
  }
  failed_ = false;
  if (failure) std::rethrow_exception(failure);
}

void MessagesAhead::forget() {
  if (thread_.forked()) return;
  Lock lock(mutex_);
  forget(lock);
}

void MessagesAhead::forget(Lock& lock) {
  // First what is not begun, so that nothing else begins while this waits. A `take` may wait for
  // one of them already.
  const auto dropped =
      std::make_exception_ptr(std::runtime_error("this message is of a job that has ended"));
  while (queue_.size() > carrying_) {
    queue_.back()->failure = dropped;
    queue_.back()->done = true;
    queue_.pop_back();
  }
  ended_.notify_all();
  ended_.wait(lock, [this] { return !carrying_; });
  queue_.clear();
  messages_.clear();
  failed_ = false;
}

}  // namespace jaxmpi
