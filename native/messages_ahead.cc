#include "messages_ahead.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>

namespace jaxmpi {
namespace {

constexpr size_t kMost =
    64;  // that nobody has taken: of a program that goes on without its last results
constexpr int64_t kAlign = 64;  // bytes

int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

}  // namespace

void MessagesAhead::count_from(int64_t first) {
  const Lock lock(mutex_);
  next_ = first;
}

// A forked child has what was in memory, and no thread: it cannot talk to the other ranks, and must
// not wait for any. It looks before it takes the mutex, which may have been taken when it was made.
bool MessagesAhead::forked() const { return thread_of_ != 0 && thread_of_ != getpid(); }

int64_t MessagesAhead::start(size_t transport, const std::vector<Array>& arrays, int64_t rows,
                             Carry carry) {
  if (forked())
    throw std::runtime_error("this process is a forked child of a rank, and cannot communicate");
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
  if (thread_of_ == 0) {
    std::thread([this] { run(); }).detach();
    thread_of_ = getpid();
  }
  while (messages_.size() >= kMost) {  // the same ones on all ranks
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
    if (failure) {  // those behind it are not begun on any rank, and nobody waits for them
      failed_ = true;
      for (auto it = messages_.begin(); it != messages_.end();)
        it = it->second->done ? std::next(it) : messages_.erase(it);
      queue_.clear();
    }
    ended_.notify_all();
  }
}

bool MessagesAhead::take(int64_t number, const std::vector<Array>& arrays) {
  if (forked()) return false;
  Lock lock(mutex_);
  const auto found = messages_.find(number);
  if (found == messages_.end()) return false;
  const auto message = found->second;
  messages_.erase(found);
  ended_.wait(lock, [&] { return message->done; });
  lock.unlock();
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
  if (forked()) return;
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
  if (forked() || !failed_) return;
  Lock lock(mutex_);
  raise(lock);
}

void MessagesAhead::raise(Lock&) {
  if (!failed_) return;
  std::exception_ptr failure;
  for (auto it = messages_.begin(); it != messages_.end();) {
    if (!failure) failure = it->second->failure;
    it = it->second->failure ? messages_.erase(it) : std::next(it);
  }
  failed_ = false;
  if (failure) std::rethrow_exception(failure);
}

void MessagesAhead::forget() {
  if (forked()) return;
  Lock lock(mutex_);
  forget(lock);
}

void MessagesAhead::forget(Lock& lock) {
  if (!queue_.empty()) queue_.erase(queue_.begin() + carrying_, queue_.end());
  ended_.wait(lock, [this] { return !carrying_; });
  queue_.clear();
  messages_.clear();
  failed_ = false;
}

}  // namespace jaxmpi
