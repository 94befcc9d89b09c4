#include "record.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <mutex>

namespace jaxmpi::record {

struct Event {
  std::atomic<int64_t> fingerprint, bytes, start, all_entered, end;
};

namespace {

constexpr int64_t kEvents = 4096;  // that are kept, each at its number modulo kEvents
constexpr int64_t kAtATime = 256;  // messages that may be in progress at a time
struct Wait {
  std::atomic<int64_t> start, end;
};
struct Record {
  char layout[1024];                    // JSON, then zeros
  std::atomic<int64_t> started, ended;  // messages
  std::atomic<int64_t> exposed_ns;      // for which programs have waited, and done nothing else
  Event events[kEvents];
  std::atomic<int64_t> waited;  // how many waits there were
  Wait waits[kEvents];
};
// Other processes read the numbers as int64 while this one writes them.
static_assert(sizeof(std::atomic<int64_t>) == sizeof(int64_t));
static_assert(std::atomic<int64_t>::is_always_lock_free);

std::string field(const char* name, size_t offset) {
  return '"' + std::string(name) + "\": " + std::to_string(offset);
}

int file = -1;

// Make the record in a file without a name, or in memory of this process where there can be none.
Record& make_record() {
  file = memfd_create(kFileName, MFD_CLOEXEC);
  if (file < 0) return *new Record{};
  void* memory = MAP_FAILED;
  if (ftruncate(file, sizeof(Record)) == 0) {
    memory = mmap(nullptr, sizeof(Record), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  if (memory != MAP_FAILED) {
    Record& record = *static_cast<Record*>(memory);
    layout().copy(record.layout, sizeof record.layout - 1);
    return record;
  }
  hide();
  return *new Record{};
}

Record& the_record() {
  static Record& made = make_record();
  return made;
}

std::mutex& entering = *new std::mutex;

// Begin the record of a message. `started` counts it last, so that no reader finds a part of it.
Event& next(int64_t fingerprint, int64_t bytes) {
  Record& record = the_record();
  const std::lock_guard<std::mutex> lock(entering);
  Event& event = record.events[record.started % kEvents];
  event.fingerprint = fingerprint;
  event.bytes = bytes;
  event.all_entered = event.end = 0;
  event.start = now();
  ++record.started;
  return event;
}

}  // namespace

void open() { the_record(); }

void hide() {
  if (const int open = std::exchange(file, -1); open >= 0) ::close(open);
}

Entered::Entered(const Transport& transport, int64_t fingerprint, int64_t bytes)
    : event_(next(fingerprint, bytes)), transport_(&transport) {}

Entered::Entered(int64_t fingerprint, int64_t bytes)
    : event_(next(fingerprint, bytes)), transport_(nullptr) {}

Entered::~Entered() {
  event_.end = now();
  // An earlier time is that of the message before: this one failed before all ranks had entered it.
  const int64_t all_entered = transport_ ? transport_->all_entered_ns() : 0;
  if (all_entered >= event_.start) event_.all_entered = all_entered;
  ++the_record().ended;
}

Exposed::~Exposed() {
  const int64_t end = now();
  Record& record = the_record();
  record.exposed_ns += end - start_;
  Wait& wait = record.waits[record.waited++ % kEvents];
  wait.start = start_;
  wait.end = end;
}

int64_t exposed_ns() { return the_record().exposed_ns; }

std::vector<std::pair<int64_t, int64_t>> last_waits() {
  std::vector<std::pair<int64_t, int64_t>> out;
  const Record& record = the_record();
  const int64_t end = record.waited;
  for (int64_t i = std::max<int64_t>(0, end - kEvents); i < end; ++i) {
    const Wait& wait = record.waits[i % kEvents];
    out.emplace_back(wait.start, wait.end);
  }
  return out;
}

std::pair<int64_t, int64_t> messages() {
  // `ended` is read first: the other way round, a rank between two messages might seem inside one.
  const Record& record = the_record();
  const int64_t ended = record.ended;
  return {record.started, ended};
}

CurrentEvent current_event() {
  const Record& record = the_record();
  const int64_t started = record.started;
  if (!started) return {0, 0, false};
  for (int64_t i = std::max<int64_t>(0, started - kAtATime); i < started; ++i) {
    const Event& event = record.events[i % kEvents];
    if (!event.end) return {event.fingerprint, event.start, true};
  }
  const Event& event = record.events[(started - 1) % kEvents];
  return {event.fingerprint, event.start, false};
}

int64_t last_fingerprint() {
  const Record& record = the_record();
  return record.started ? record.events[(record.started - 1) % kEvents].fingerprint.load() : 0;
}

std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>> last_events() {
  std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>> out;
  const Record& record = the_record();
  const int64_t end = record.started;
  for (int64_t i = std::max<int64_t>(0, end - kEvents); i < end; ++i) {
    const Event& event = record.events[i % kEvents];
    out.emplace_back(i, event.fingerprint, event.bytes, event.start, event.all_entered, event.end);
  }
  return out;
}

std::string layout() {
  return "{" + field("bytes", sizeof(Record)) + ", \"counters\": {" +
         field("started", offsetof(Record, started)) + ", " +
         field("ended", offsetof(Record, ended)) + ", " +
         field("exposed_ns", offsetof(Record, exposed_ns)) + "}, \"events\": {" +
         field("offset", offsetof(Record, events)) + ", " + field("count", kEvents) + ", " +
         field("bytes", sizeof(Event)) + ", \"fields\": {" +
         field("fingerprint", offsetof(Event, fingerprint)) + ", " +
         field("bytes", offsetof(Event, bytes)) + ", " + field("start", offsetof(Event, start)) +
         ", " + field("all_entered", offsetof(Event, all_entered)) + ", " +
         field("end", offsetof(Event, end)) + "}}}";
}

}  // namespace jaxmpi::record
