#include "mpi_waits.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "clock.h"

namespace jaxmpi::mpi {

struct Wait::Entry {
  std::function<std::string()> describe, missing;
  int64_t since;
  bool reported = false;
};

namespace {

constexpr double kSeconds = 1e9;  // nanoseconds
constexpr double kStallSeconds = 60;

// Never destroyed: the thread may run until the process has ended.
std::mutex& mutex = *new std::mutex;
std::atomic<bool> is_left_to_monitor{false};

double seconds_of(const char* name, double otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atof(text) : otherwise;
}

}  // namespace

std::set<Wait::Entry*>& Wait::entries() {
  static auto& all = *new std::set<Entry*>;
  return all;
}

Wait::Wait(std::function<std::string()> describe, std::function<std::string()> missing) {
  entry_ = new Entry{std::move(describe), std::move(missing), now()};
  const std::lock_guard lock(mutex);
  entries().insert(entry_);
}

Wait::~Wait() {
  const std::lock_guard lock(mutex);
  entries().erase(entry_);
  delete entry_;
}

void watch_waits(std::function<void(const std::string&)> say, std::function<void()> end,
                 std::function<void()> also) {
  const double stall = seconds_of("JAXMPI_STALL_SECONDS", kStallSeconds);
  const double last = seconds_of("JAXMPI_STALL_END_SECONDS", 0);
  std::thread([=] {
    for (;;) {
      usleep(200'000);
      also();
      std::vector<std::string> reports;
      bool over = false;
      {
        const std::lock_guard lock(mutex);
        for (Wait::Entry* entry : Wait::entries()) {
          Wait::Entry& wait = *entry;
          const double waited = (now() - wait.since) / kSeconds;
          const bool ends = !is_left_to_monitor && last > 0 && waited > last;
          const bool is_late = stall > 0 && waited > stall && !wait.reported;
          if (!ends && !is_late) continue;
          wait.reported = true;
          over = over || ends;
          char seconds[32];
          std::snprintf(seconds, sizeof seconds, "%.0f", waited);
          std::string text = "has waited " + std::string(seconds) + " s in " + wait.describe();
          if (const std::string missing = wait.missing(); !missing.empty()) text += "; " + missing;
          reports.push_back(text + (ends ? ". It ends the job." : "."));
        }
      }
      for (const std::string& report : reports) say(report);
      if (over) end();
    }
  }).detach();
}

void leave_end_to_monitor(bool is_left) { is_left_to_monitor = is_left; }

}  // namespace jaxmpi::mpi
