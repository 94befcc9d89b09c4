// Calls of programs, and branches of them, that the ranks have not compared yet, and compare with
// their next message.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace jaxmpi {

// The fingerprint of a message, and what the ranks compare.
struct Fingerprints {
  int64_t message;   // of the message alone
  int64_t compared;  // of the message and the calls before it: it differs where one of them does
  int64_t calls;     // how many calls these are
};

// A program whose messages are all in branches does not compare itself when it is called. Its first
// call sends a comparison. Later ones become part of what the following messages compare: nothing
// more is sent, and a difference is found at the next message, or at the comparison that is sent
// after kMost calls.
//
// A program under plain jax.jit does not compare itself. Where it takes a branch, and other
// branches send other messages, the branch counts as a call here.
class UncomparedCalls {
 public:
  // Record a call of a program, to be compared with the next message; or return true, on all ranks
  // alike, if they must compare it now.
  bool compare_now(int64_t program);

  // Record a branch that a program takes, to be compared with the next message.
  void record(int64_t branch);

  // Record that the ranks have compared a program.
  void compared(int64_t program);

  // Return the fingerprints of a message that this rank is about to send to all ranks.
  Fingerprints fingerprints_of(int64_t message);

  // Return the number of the first call that is still known, and the programs of the calls from
  // that one up to, and without, call number `calls`.
  std::pair<int64_t, std::vector<int64_t>> before(int64_t calls);

  // Forget the calls. All ranks do so after the same message.
  void forget_calls();

  // Forget the calls and the programs.
  void forget();

 private:
  std::mutex mutex_;
  std::set<int64_t> known_;   // programs that the ranks have compared
  std::deque<int64_t> last_;  // the programs of the last calls, and branches
  int64_t count_ = 0;         // calls and branches
  int64_t since_ = 0;         // calls since the last message to all ranks
  uint64_t digest_ = 0;       // of all calls, in their order

  void add(int64_t call);  // with the lock
};

}  // namespace jaxmpi
