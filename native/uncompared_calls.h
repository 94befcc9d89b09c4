// Calls of programs that the ranks compare with their next message.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace jaxmpi {

// What a message has the ranks compare.
struct Fingerprints {
  int64_t own;    // of the message alone
  int64_t sent;   // what the ranks compare: it differs where `own` or one of the calls before does
  int64_t calls;  // how many these are
};

// A program whose messages are all in branches does not compare itself when it is called. Its first
// call sends a comparison. Later ones become part of what the following messages compare: nothing
// more is sent, and a difference is found at the next message, or at the comparison that is sent
// after kMost calls.
class UncomparedCalls {
 public:
  // Adds a call of a program, or returns true: then the ranks are to compare it now, all of them.
  bool compare_now(int64_t program);

  // The ranks have compared a program.
  void compared(int64_t program);

  // Of a message that this rank is about to send to all ranks.
  Fingerprints fingerprints_of(int64_t word);

  // The number of the first call that is still known, and the programs of this one and of those
  // behind it, before `calls`.
  std::pair<int64_t, std::vector<int64_t>> before(int64_t calls);

  // Forgets the calls. All ranks do so at the same place.
  void forget_calls();

  // Forgets the programs, too.
  void forget();

 private:
  std::mutex mutex_;
  std::set<int64_t> known_;   // programs that the ranks have compared
  std::deque<int64_t> last_;  // of the calls, their programs
  int64_t count_ = 0;         // of all calls
  int64_t since_ = 0;         // of those since the last message to all ranks
  uint64_t digest_ = 0;       // of all calls
};

}  // namespace jaxmpi
