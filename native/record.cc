#include "record.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>

namespace jaxmpi::record {

struct Event {
  std::atomic<int64_t> word, bytes, start, met, end;
};

namespace {

constexpr int64_t kEvents = 4096;  // that are kept, each at its number modulo kEvents
struct Wait {
  std::atomic<int64_t> start, end;
};
struct Record {
  std::atomic<int64_t> started, ended;  // messages
  std::atomic<int64_t>
      exposed;  // nanoseconds for which programs have waited for messages, and done nothing else
  Event events[kEvents];
  std::atomic<int64_t> waited;  // how many times
  Wait waits[kEvents];
};

// In a file without a name, which `jaxmpi top` reads as /proc/PID/fd/N; in memory of our own where
// there can be none.
Record& make_record() {
  const int file = memfd_create("jaxmpi-events", MFD_CLOEXEC);
  if (file < 0) return *new Record{};
  void* memory = MAP_FAILED;
  if (ftruncate(file, sizeof(Record)) == 0) {
    memory = mmap(nullptr, sizeof(Record), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  if (memory != MAP_FAILED) return *static_cast<Record*>(memory);
  ::close(file);
  return *new Record{};
}

Record& record = make_record();
std::mutex& entering = *new std::mutex;

Event& next(int64_t word, int64_t bytes) {
  const std::lock_guard<std::mutex> lock(entering);
  Event& event = record.events[record.started % kEvents];
  event.word = word;
  event.bytes = bytes;
  event.met = event.end = 0;
  event.start = now();
  ++record.started;
  return event;
}

}  // namespace

Entered::Entered(const Transport& transport, int64_t word, int64_t bytes)
    : event_(next(word, bytes)), transport_(transport) {}

Entered::~Entered() {
  event_.end = now();
  if (transport_.met() >= event_.start) event_.met = transport_.met();
  ++record.ended;
}

Exposed::~Exposed() {
  const int64_t end = now();
  record.exposed += end - start_;
  Wait& wait = record.waits[record.waited++ % kEvents];
  wait.start = start_;
  wait.end = end;
}

int64_t exposed_ns() { return record.exposed; }

std::vector<std::pair<int64_t, int64_t>> last_waits() {
  std::vector<std::pair<int64_t, int64_t>> out;
  const int64_t end = record.waited;
  for (int64_t i = std::max<int64_t>(0, end - kEvents); i < end; ++i) {
    const Wait& wait = record.waits[i % kEvents];
    out.emplace_back(wait.start, wait.end);
  }
  return out;
}

std::pair<int64_t, int64_t> messages() {
  const int64_t ended = record.ended;  // first, so that what is between two messages does not look
                                       // like being inside of one
  return {record.started, ended};
}

int64_t word() {
  return record.started ? record.events[(record.started - 1) % kEvents].word.load() : 0;
}

std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>> last_events() {
  std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>> out;
  const int64_t end = record.started;
  for (int64_t i = std::max<int64_t>(0, end - kEvents); i < end; ++i) {
    const Event& event = record.events[i % kEvents];
    out.emplace_back(i, event.word, event.bytes, event.start, event.met, event.end);
  }
  return out;
}

}  // namespace jaxmpi::record
