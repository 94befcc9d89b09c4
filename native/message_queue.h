// The queue of a rank's messages, and the threads that carry messages out beside the program.
//
// A program asks for its messages in one order, the same on all ranks. The place of a message in
// this order is its ticket. There are three kinds:
//
//   at once   the program waits until it is done
//   started   works on arrays of the program, which waits for it later in the same call
//   ahead     works on copies; a later call of the program takes its results, or none does
//
// The rule:
//
//   A message begins once every earlier one that holds it up has ended:
//   - one that is started, or at once, holds up all later messages;
//   - one that was sent ahead holds up the later ones sent ahead, and all later ones of its
//   transport.
//
// A message that was sent ahead may take as long as many steps of the program, so it must not hold
// up other transports. One thread carries the started messages, and another one those sent ahead:
// each takes the oldest of its kind, in its turn. A message at once runs on the program's thread.
//
// Why a started message holds up all transports:
// - The ranks compare their programs by the first message to all of them. If they differ there, a
//   rank must not begin its next message, to a group: another rank of the group may run a program
//   without it, and wait for all ranks, so as to describe the difference.
// - MPI may allow one thread at a time. (Then nothing is sent ahead.)
// - The messages of a GPU share buffers.
//
// Why it cannot deadlock: whatever waits here waits for smaller tickets only, be it a message for
// its turn, or the program for a message that it has asked for before. Let m be the first message,
// in the order of the program, that some rank has not ended. All before m have ended on all ranks,
// so none of m's ranks waits for anything else: each begins m, and m ends. By induction, all end.
//
// A failure fails the messages behind that the failed one holds up: none of them begins. (A message
// at once holds up none: it throws on the program's thread, which has asked for nothing yet.) This
// follows from the order of the program alone, so it is the same on all ranks of a transport. The
// program gets the failure once, where it first waits for one of these messages; then all of them
// are dropped.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "call.h"

namespace jaxmpi {

// A forked child of the process shares the memory of the node with it, and would communicate in its
// place: the other ranks would take what the child sends for what the rank sends. And the child has
// not the threads, one of which may have held the mutex at the fork. So from `open` to `close`,
// what waits or asks for a message throws in a child, before it takes the mutex, and the rest does
// nothing.
class MessageQueue {
 public:
  // Where a program has the arrays of a started message.
  using Memory = std::vector<const void*>;

  // Let no child that this process forks from now on communicate. There is one queue in a process.
  void open();

  // Carry out a message at once, on this thread, by run(). Throw what it throws, or a failure of a
  // message that it waits for.
  template <class Run>
  void run_at_once(size_t transport, Run run) {
    const auto message = begin_at_once(transport);
    try {
      run();
    } catch (...) {
      end_at_once(message);
      throw;
    }
    end_at_once(message);
  }

  // Start a message that carry() carries out. Until its wait returns, the memory belongs to it.
  // Where the program fails before that, XLA frees the memory, and tells nobody: what makes a
  // program fail calls `end_started` first.
  void start(size_t transport, std::function<void()> carry, Memory memory);

  // Wait for the oldest started message that nobody has waited for; throw its failure. `memory` is
  // where the program has its arrays now: XLA must not have moved them.
  void wait(const Memory& memory);

  // Wait until the started messages have ended, in a program that is about to fail. They are
  // carried out, and not dropped: the other ranks have started them, too, or have failed before.
  void end_started();

  // Drop the started messages that nobody has waited for, and fail what they hold up, once the one
  // in progress has ended. Only a call that has failed leaves such messages.
  void forget_started();

  // Set the number of the first message sent ahead: the same on all ranks, and another one in each
  // job.
  void count_from(int64_t first);

  // Send copies of the arrays' `in` ahead, and return the number of the message, which is the same
  // on all ranks. carry(arrays) carries it out. Each result has `rows` rows as large as the array.
  int64_t send_ahead(size_t transport, int64_t fingerprint, const std::vector<Array>& arrays,
                     int64_t rows, std::function<void(std::vector<Array>)> carry);

  // Wait for a message sent ahead, and copy its results to the arrays' `out`; throw its failure.
  // Return false where there is none of this number: then there is none on the other ranks either.
  bool take(int64_t number, const std::vector<Array>& arrays);

  // Wait until all messages have ended, those that nobody takes, too, and their failures. This rank
  // may leave, and MPI may end, only then.
  void wait_for_all();

  // Throw a failure of a message of this transport that the program has not got yet.
  void raise(size_t transport);

  // Drop all messages, once those in progress have ended. Those that have not begun fail, because
  // another thread may wait for one.
  void close();

 private:
  enum class Kind { Started, Ahead, AtOnce };
  enum class State { Waiting, InProgress, Ended };
  struct Message {
    const Kind kind;
    const size_t transport;
    std::function<void()> carry;  // of a message that a thread carries out
    State state = State::Waiting;
    std::exception_ptr failure = {};
  };
  using Handle = std::shared_ptr<Message>;
  struct Started {
    Handle message;
    Memory memory;
  };
  struct Sent {
    Handle message;
    int64_t fingerprint;
    int64_t rows;
    std::vector<Array> arrays;
    std::shared_ptr<char> copies;  // of the operands, and room for the results
  };
  using Lock = std::unique_lock<std::mutex>;

  Handle begin_at_once(size_t transport);
  void end_at_once(const Handle& message);

  static void check_not_forked();
  Handle add(Kind kind, size_t transport, std::function<void()> carry);
  void run_thread(Kind kind);
  Handle next(Kind kind) const;
  static bool holds_up(const Message& earlier, const Message& later);
  bool is_held_up(const Message& message) const;
  void end(const Handle& message, std::exception_ptr failure);
  void fail_those_behind();
  void wake();
  void wait_for(Lock& lock, const Handle& message);
  void forget_started(Lock& lock);
  std::map<int64_t, Sent>::iterator surplus(int64_t fingerprint, size_t bytes);
  void drop(const std::exception_ptr& failure);
  [[noreturn]] void fail(const std::exception_ptr& failure);

  std::mutex mutex_;
  // In the order of their tickets: those that have not ended, and those whose failure the program
  // has not got yet.
  std::vector<Handle> messages_;
  std::deque<Started> started_;    // that nobody has waited for
  std::map<int64_t, Sent> ahead_;  // that nobody has taken, by number
  int64_t next_number_ = 1;

  // For the threads of the started messages, and of those sent ahead: there may be a next message.
  std::array<std::condition_variable, 2> may_begin_;
  std::array<bool, 2> runs_ = {};  // whether there is such a thread
  std::condition_variable ended_;  // for the program: a message has
};

}  // namespace jaxmpi
