// What this rank waits for, and a thread that says so when it takes long.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace jaxmpi::mpi {

// What the thread that watches the waits calls.
struct Watcher {
  std::function<void(const std::string&)> say;  // a sentence about a wait
  std::function<bool(int)> has_left;            // whether a rank has come to its end
  // Ends the job: for ranks that have left and were waited for, or after a wait that took too long,
  // if there are none.
  std::function<void(const std::set<int>& left)> end;
  std::function<void()> look;  // called every fifth of a second
};

// Start a thread that watches the waits. It says so of each one that takes longer than
// JAXMPI_STALL_SECONDS (60 by default). It ends the job for one that takes longer than
// JAXMPI_STALL_END_SECONDS; by default it never does: nothing is known of what the missing rank
// does, and it may evaluate or write a checkpoint. (0 means never, for both variables.) It also
// ends the job for a wait that goes on for some seconds after one of its ranks has left.
void watch_waits(Watcher watcher);

// Return how many waits of this rank have begun, and how many of them have not ended.
std::pair<int64_t, int64_t> count_waits();

// Leave it to the rank's monitor to end the job for a long wait, or take it back. While it is left
// to the monitor, long waits are only reported. (A wait for a rank that has left ends the job.)
void leave_end_to_monitor(bool is_left);

// A wait, for as long as it exists. describe() returns a phrase such as "an all-reduce of 4096
// bytes", and missing() who has not come, or ""; the watching thread calls both. The
// wait ends only once each of `ranks` has done its part; this rank may be one of them.
class Wait {
 public:
  Wait(std::function<std::string()> describe, std::function<std::string()> missing,
       std::vector<int> ranks);
  ~Wait();
  Wait(const Wait&) = delete;
  Wait& operator=(const Wait&) = delete;

 private:
  friend void watch_waits(Watcher);
  friend std::pair<int64_t, int64_t> count_waits();
  struct Entry;
  static std::set<Entry*>& entries();  // of all threads
  static std::vector<int> find_left(Entry&, const Watcher&);
  Entry* entry_;
};

}  // namespace jaxmpi::mpi
