// The last messages of this process, for the flight recorder, the stall watch and `jaxmpi top`.
//
// The record is a file without a name (memfd kFileName), which other processes of the same user
// read as /proc/PID/fd/N. It begins with its own layout, as JSON (`layout`), so that a reader of
// another version of jaxmpi reads it right, or finds that it cannot.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "transport.h"

namespace jaxmpi::record {

// Make the record. Without it, the first message does.
void open();

// Close its file, so that no other process finds it; messages are recorded as before.
void hide();

// Records a message as the last one, from its constructor, when this rank is ready to communicate,
// to its destructor. It is the only message of its transport that is in progress.
class Entered {
 public:
  Entered(const Transport& transport, int64_t fingerprint, int64_t bytes);
  // From one rank to another, without a transport: it is not known when the other is ready.
  Entered(int64_t fingerprint, int64_t bytes);
  ~Entered();
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;

 private:
  struct Event& event_;
  const Transport* transport_;
};

// Records a wait, from its constructor to its destructor, for which its thread does nothing else.
class Exposed {
 public:
  ~Exposed();

 private:
  const int64_t start_ = now();
};

// The nanoseconds of all waits.
int64_t exposed_ns();

// When the last waits began and ended, in nanoseconds of the steady clock, in the order of their
// ends.
std::vector<std::pair<int64_t, int64_t>> last_waits();

// How many messages have begun, and how many of them have ended.
std::pair<int64_t, int64_t> messages();

// The oldest message that is in progress, or else the last one; zeros before the first one.
struct CurrentEvent {
  int64_t fingerprint, start;
  bool in_progress;
};
CurrentEvent current_event();

// The fingerprint of the last message; 0 before the first one.
int64_t last_fingerprint();

// The last messages: number, fingerprint, bytes, start, all_entered, end. The last three are
// nanoseconds of the steady clock: when this rank entered the message, when all ranks had, and when
// it was done here; 0 for what has not happened yet.
std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>> last_events();

// The name of the file of the record.
constexpr char kFileName[] = "jaxmpi-events";

// The layout of the record as JSON, for example
//
//   {"bytes": 262144, "counters": {"started": 2048, "ended": 2056, "exposed_ns": 2064},
//    "events": {"offset": 2072, "count": 4096, "bytes": 40, "fields": {"fingerprint": 0, ...}}}
//
// Numbers are offsets and lengths in bytes. Each counter and field is an int64. Event number n is
// at offset + n % count * bytes.
std::string layout();

}  // namespace jaxmpi::record
