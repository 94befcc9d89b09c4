#include "message_queue.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>

#include "record.h"

namespace jaxmpi {
namespace {

// Messages sent ahead that are kept until a program takes them: all together, and those of one
// fingerprint, which one place of one program sends. Runs by turns of one program have one each,
// and a run may end without taking its last one: so of large messages fewer are kept, and more of
// small ones.
constexpr size_t kMost = 64, kMostAlike = 8, kMostAlikeBytes = size_t{256} << 20;
constexpr int64_t kAlign = 64;  // bytes

int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

std::exception_ptr error_of(const char* text) {
  return std::make_exception_ptr(std::runtime_error(text));
}

// Whether the queue is open, and whether this process is a forked child of one in which it was. A
// handler of forks sets the second, because a message that asked for the process's number would
// make a system call.
std::atomic<bool> is_open = false, is_forked = false;

bool forked() { return is_forked.load(std::memory_order_relaxed); }

}  // namespace

void MessageQueue::open() {
  static const int refused =
      pthread_atfork(nullptr, nullptr, [] { is_forked = is_forked || is_open; });
  if (refused) throw std::bad_alloc();
  is_open = true;
}

// The order

bool MessageQueue::holds_up(const Message& earlier, const Message& later) {
  return earlier.kind != Kind::Ahead || later.kind == Kind::Ahead ||
         earlier.transport == later.transport;
}

bool MessageQueue::is_held_up(const Message& message) const {
  for (const Handle& earlier : messages_) {
    if (earlier.get() == &message) return false;
    if (earlier->state != State::Ended && holds_up(*earlier, message)) return true;
  }
  return false;
}

// Return the message that the thread of a kind carries out now; null while there is none.
MessageQueue::Handle MessageQueue::next(Kind kind) const {
  for (const Handle& message : messages_) {
    if (message->kind == kind && message->state == State::Waiting)
      return is_held_up(*message) ? nullptr : message;
  }
  return nullptr;
}

// Give a message its ticket: its place in `messages_`.
MessageQueue::Handle MessageQueue::add(Kind kind, size_t transport, std::function<void()> carry) {
  const auto thread = static_cast<size_t>(kind);
  if (kind != Kind::AtOnce && !runs_[thread]) {
    std::thread([this, kind] { run_thread(kind); }).detach();
    runs_[thread] = true;
  }
  const auto message = std::make_shared<Message>(Message{kind, transport, std::move(carry)});
  messages_.push_back(message);
  // It may be behind a failure that the program has not got yet.
  fail_those_behind();
  if (kind != Kind::AtOnce) may_begin_[thread].notify_one();
  return message;
}

void MessageQueue::end(const Handle& message, std::exception_ptr failure) {
  message->state = State::Ended;
  message->failure = failure;
  if (failure) {
    fail_those_behind();
  } else {
    messages_.erase(std::find(messages_.begin(), messages_.end(), message));
  }
  wake();
}

// Fail what a failed message holds up. One that is in progress is behind no failure: it began when
// all that hold it up had ended, and had not failed.
void MessageQueue::fail_those_behind() {
  for (size_t i = 0; i < messages_.size(); ++i) {
    const Message& earlier = *messages_[i];
    if (!earlier.failure) continue;
    for (size_t k = i + 1; k < messages_.size(); ++k) {
      Message& later = *messages_[k];
      if (later.state != State::Waiting || !holds_up(earlier, later)) continue;
      later.state = State::Ended;
      later.failure = earlier.failure;
    }
  }
}

// Wake the program, and the threads whose turn it may be: only a thread that has a message waiting.
// Otherwise each message at once would wake both threads, and take a core from the program.
void MessageQueue::wake() {
  ended_.notify_all();
  for (const Handle& message : messages_) {
    if (message->kind != Kind::AtOnce && message->state == State::Waiting)
      may_begin_[static_cast<size_t>(message->kind)].notify_one();
  }
}

// Forget the messages that have failed with a failure, because the program gets it now. A thread
// that still waits for one of them has its own handle.
void MessageQueue::drop(const std::exception_ptr& failure) {
  const auto has_it = [&](const Handle& message) { return message->failure == failure; };
  messages_.erase(std::remove_if(messages_.begin(), messages_.end(), has_it), messages_.end());
  started_.erase(std::remove_if(started_.begin(), started_.end(),
                                [&](const Started& started) { return has_it(started.message); }),
                 started_.end());
  for (auto it = ahead_.begin(); it != ahead_.end();)
    it = has_it(it->second.message) ? ahead_.erase(it) : std::next(it);
}

void MessageQueue::fail(const std::exception_ptr& failure) {
  const std::exception_ptr thrown = failure;  // drop may free what it refers to
  drop(thrown);
  std::rethrow_exception(thrown);
}

void MessageQueue::raise(size_t transport) {
  if (forked()) return;
  const Lock lock(mutex_);
  for (const Handle& message : messages_) {
    if (message->failure && message->transport == transport) fail(message->failure);
  }
}

void MessageQueue::wait_for_all() {
  if (forked()) return;
  Lock lock(mutex_);
  ended_.wait(lock, [this] {
    return std::all_of(messages_.begin(), messages_.end(),
                       [](const Handle& message) { return message->state == State::Ended; });
  });
}

void MessageQueue::close() {
  if (forked()) return;
  Lock lock(mutex_);
  const auto dropped = error_of("this message is of a job that has ended");
  // What has not begun fails first, so that nothing else begins while this waits. Another thread
  // may add a message meanwhile.
  for (bool in_progress = true; in_progress;) {
    in_progress = false;
    for (const Handle& message : messages_) {
      in_progress |= message->state == State::InProgress;
      if (message->state != State::Waiting) continue;
      message->state = State::Ended;
      message->failure = dropped;
    }
    ended_.notify_all();
    if (in_progress) ended_.wait(lock);
  }
  messages_.clear();
  started_.clear();
  ahead_.clear();
  is_open = false;
}

// The threads

// Carry out the messages of one kind, until the process ends.
void MessageQueue::run_thread(Kind kind) {
  Lock lock(mutex_);
  for (;;) {
    Handle message;
    may_begin_[static_cast<size_t>(kind)].wait(lock, [&] { return message = next(kind); });
    message->state = State::InProgress;
    lock.unlock();
    std::exception_ptr failure;
    try {
      message->carry();
    } catch (...) {
      failure = std::current_exception();
    }
    message->carry = {};  // which may free memory, so before the mutex is held again
    lock.lock();
    end(message, failure);
  }
}

void MessageQueue::check_not_forked() {
  if (forked())
    throw std::runtime_error("this process is a forked child of a rank, and cannot communicate");
}

// Wait until a message has ended; throw its failure.
void MessageQueue::wait_for(Lock& lock, const Handle& message) {
  ended_.wait(lock, [&] { return message->state == State::Ended; });
  if (message->failure) fail(message->failure);
}

// At once

MessageQueue::Handle MessageQueue::begin_at_once(size_t transport) {
  check_not_forked();
  Lock lock(mutex_);
  Handle message = add(Kind::AtOnce, transport, {});
  const auto has_turn = [&] { return message->state == State::Ended || !is_held_up(*message); };
  if (!has_turn()) {
    const record::Exposed exposed;
    ended_.wait(lock, has_turn);
  }
  if (message->failure) fail(message->failure);
  message->state = State::InProgress;
  return message;
}

// The program gets a failure of this message at once, so it is not kept.
void MessageQueue::end_at_once(const Handle& message) {
  const Lock lock(mutex_);
  end(message, nullptr);
}

// Started

void MessageQueue::start(size_t transport, std::function<void()> carry, Memory memory) {
  check_not_forked();
  const Lock lock(mutex_);
  started_.push_back({add(Kind::Started, transport, std::move(carry)), std::move(memory)});
}

void MessageQueue::wait(const Memory& memory) {
  check_not_forked();
  Lock lock(mutex_);
  if (started_.empty())
    throw std::logic_error("a program waits for a message that it has not started");
  const Started oldest = std::move(started_.front());
  started_.pop_front();
  wait_for(lock, oldest.message);
  if (oldest.memory == memory) return;
  forget_started(lock);
  throw std::logic_error(
      "XLA has moved an array while it was on its way. Set JAXMPI_OVERLAP=0, and report it to "
      "jaxmpi");
}

void MessageQueue::end_started() {
  if (forked()) return;
  Lock lock(mutex_);
  ended_.wait(lock, [this] {
    return std::all_of(started_.begin(), started_.end(), [](const Started& started) {
      return started.message->state == State::Ended;
    });
  });
}

void MessageQueue::forget_started() {
  if (forked()) return;
  Lock lock(mutex_);
  forget_started(lock);
}

void MessageQueue::forget_started(Lock& lock) {
  // First what has not begun, so that nothing else begins while this waits.
  const auto dropped = error_of("this message is of a call that has failed");
  for (const Started& started : started_) {
    if (started.message->state != State::Waiting) continue;
    started.message->state = State::Ended;
    started.message->failure = dropped;
  }
  fail_those_behind();
  ended_.wait(lock, [this] {
    return std::none_of(started_.begin(), started_.end(), [](const Started& started) {
      return started.message->state == State::InProgress;
    });
  });
  // Drop each with the messages that failed because of it.
  while (!started_.empty()) {
    const Handle message = started_.front().message;
    started_.pop_front();
    if (message->failure) drop(message->failure);
  }
}

// Sent ahead

void MessageQueue::count_from(int64_t first) {
  const Lock lock(mutex_);
  next_number_ = first;
}

// Return the oldest message that has to go before one more of this fingerprint is sent, which takes
// so many bytes; else, end.
std::map<int64_t, MessageQueue::Sent>::iterator MessageQueue::surplus(int64_t fingerprint,
                                                                      size_t bytes) {
  if (ahead_.size() >= kMost) return ahead_.begin();
  const size_t most_alike = std::max(kMostAlike, kMostAlikeBytes / std::max<size_t>(bytes, 1));
  const auto is_alike = [=](const auto& sent) { return sent.second.fingerprint == fingerprint; };
  const auto alike = static_cast<size_t>(std::count_if(ahead_.begin(), ahead_.end(), is_alike));
  return alike < most_alike ? ahead_.end() : std::find_if(ahead_.begin(), ahead_.end(), is_alike);
}

int64_t MessageQueue::send_ahead(size_t transport, int64_t fingerprint,
                                 const std::vector<Array>& arrays, int64_t rows,
                                 std::function<void(std::vector<Array>)> carry) {
  check_not_forked();
  // The program may reuse its arrays at once, so the message has copies: for each array its
  // operand, then its result, in one block of memory.
  int64_t bytes = 0;
  for (const Array& array : arrays) bytes += aligned(array.bytes()) + aligned(rows * array.bytes());
  const std::shared_ptr<char> copies(
      static_cast<char*>(std::aligned_alloc(kAlign, std::max(bytes, kAlign))), std::free);
  if (!copies) throw std::bad_alloc();
  std::vector<Array> copied = arrays;
  char* at = copies.get();
  for (Array& array : copied) {
    std::memcpy(at, array.in, array.bytes());
    array.in = at;
    array.out = at + aligned(array.bytes());
    at = array.out + aligned(rows * array.bytes());
  }

  Lock lock(mutex_);
  // All ranks drop the same message, because all have sent the same ones: either all find it when
  // they take its number, or none does.
  for (;;) {
    const auto oldest = surplus(fingerprint, static_cast<size_t>(bytes));
    if (oldest == ahead_.end()) break;
    const int64_t number = oldest->first;
    wait_for(lock, Handle(oldest->second.message));
    ahead_.erase(number);
  }
  // The message keeps its memory: a job that ends forgets the rest while the message is in
  // progress.
  Handle message =
      add(Kind::Ahead, transport, [carry = std::move(carry), copied, copies] { carry(copied); });
  ahead_[next_number_] = {std::move(message), fingerprint, rows, std::move(copied), copies};
  return next_number_++;
}

bool MessageQueue::take(int64_t number, const std::vector<Array>& arrays) {
  if (forked()) return false;
  Lock lock(mutex_);
  const auto found = ahead_.find(number);
  if (found == ahead_.end()) return false;
  // Erased before the wait, so that nobody takes it twice.
  const Sent sent = std::move(found->second);
  ahead_.erase(found);
  wait_for(lock, sent.message);
  lock.unlock();  // the message is this call's alone: copy without the mutex
  if (sent.arrays.size() != arrays.size())
    throw std::logic_error("a message of other arrays than those that take it");
  for (size_t i = 0; i < arrays.size(); ++i) {
    const Array &mine = sent.arrays[i], &to = arrays[i];
    if (mine.type != to.type || mine.columns != to.columns) {
      throw std::logic_error("a message of other arrays than those that take it");
    }
    std::memcpy(to.out, mine.out, sent.rows * mine.bytes());
  }
  return true;
}

}  // namespace jaxmpi
