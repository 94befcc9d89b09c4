// What this rank waits for, and a thread that says so when it takes long.
#pragma once

#include <functional>
#include <set>
#include <string>

namespace jaxmpi::mpi {

// Start a thread that watches the waits. `say` gets a sentence for each one that takes longer than
// JAXMPI_STALL_SECONDS (60 by default). If one takes longer than JAXMPI_STALL_END_SECONDS, `end` is
// called; by default it never is: nothing is known of what the missing rank does, and it may
// evaluate or write a checkpoint. 0 means never, for both. The thread calls `also` several times a
// second.
void watch_waits(std::function<void(const std::string&)> say, std::function<void()> end,
                 std::function<void()> also);

// Leave it to the rank's monitor to end the job for a long wait, or take it back. While it is left
// to the monitor, long waits are only reported.
void leave_end_to_monitor(bool is_left);

// A wait, for as long as it exists. describe() returns a phrase such as "an all-reduce of 4096
// bytes", and missing() who has not come, or ""; the watching thread calls both.
class Wait {
 public:
  Wait(std::function<std::string()> describe, std::function<std::string()> missing);
  ~Wait();
  Wait(const Wait&) = delete;
  Wait& operator=(const Wait&) = delete;

 private:
  friend void watch_waits(std::function<void(const std::string&)>, std::function<void()>,
                          std::function<void()>);
  struct Entry;
  static std::set<Entry*>& entries();  // of all threads
  Entry* entry_;
};

}  // namespace jaxmpi::mpi
