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
  const std::vector<int>& ranks;
  int64_t since;
  bool reported = false;
};

namespace {

constexpr double kSeconds = 1e9;  // nanoseconds
constexpr double kStallSeconds = 60;
constexpr double kLeftSeconds = 3;  // for what a rank has sent before it left

// Never destroyed: the thread may run until the process has ended.
std::mutex& mutex = *new std::mutex;
int64_t begun = 0;  // waits
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

Wait::Wait(std::function<std::string()> describe, std::function<std::string()> missing,
           const std::vector<int>& ranks) {
  entry_ = new Entry{std::move(describe), std::move(missing), ranks, now()};
  const std::lock_guard lock(mutex);
  ++begun;
  entries().insert(entry_);
}

Wait::~Wait() {
  const std::lock_guard lock(mutex);
  entries().erase(entry_);
  delete entry_;
}

// Look for ranks that have left among those of a wait, add them to `left`, and return words for it.
std::string Wait::find_left(const Entry& wait, double waited, const Watcher& watcher,
                            std::vector<int>& left) {
  if (waited < kLeftSeconds) return "";
  for (const int rank : wait.ranks) {
    if (!watcher.has_left(rank)) continue;
    left.push_back(rank);
    return "rank " + std::to_string(rank) + " has left, and does not come";
  }
  return "";
}

void watch_waits(Watcher watcher) {
  const double stall = seconds_of("JAXMPI_STALL_SECONDS", kStallSeconds);
  const double last = seconds_of("JAXMPI_STALL_END_SECONDS", 0);
  std::thread([=] {
    for (;;) {
      usleep(200'000);
      watcher.also();
      std::vector<std::string> reports;
      std::vector<int> left;
      bool over = false;
      {
        const std::lock_guard lock(mutex);
        for (Wait::Entry* entry : Wait::entries()) {
          Wait::Entry& wait = *entry;
          const double waited = (now() - wait.since) / kSeconds;
          std::string why = Wait::find_left(wait, waited, watcher, left);
          const bool ends = !why.empty() || (!is_left_to_monitor && last > 0 && waited > last);
          const bool is_late = stall > 0 && waited > stall && !wait.reported;
          if (!ends && !is_late) continue;
          wait.reported = true;
          over = over || ends;
          char seconds[32];
          std::snprintf(seconds, sizeof seconds, "%.0f", waited);
          if (why.empty()) why = wait.missing();
          std::string text = "has waited " + std::string(seconds) + " s in " + wait.describe();
          if (!why.empty()) text += "; " + why;
          reports.push_back(text + (ends ? ". It ends the job." : "."));
        }
      }
      for (const std::string& report : reports) watcher.say(report);
      if (over) watcher.end(left);
    }
  }).detach();
}

std::pair<int64_t, int64_t> count_waits() {
  const std::lock_guard lock(mutex);
  return {begun, static_cast<int64_t>(Wait::entries().size())};
}

void leave_end_to_monitor(bool is_left) { is_left_to_monitor = is_left; }

}  // namespace jaxmpi::mpi
