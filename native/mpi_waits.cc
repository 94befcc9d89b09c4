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
  std::vector<int> ranks;
  int64_t since;
  int64_t left_since = 0;  // when one of the ranks was first seen to have left
  bool reported = false;
};

namespace {

constexpr double kSeconds = 1e9;  // nanoseconds
constexpr double kStallSeconds = 60;
constexpr double kShortSeconds = 1;  // a wait for which no rank is suspected
constexpr double kLeftSeconds = 3;   // from then on: what a rank has sent before may still arrive

// Never destroyed: the thread may run until the process has ended.
std::mutex& waits_mutex = *new std::mutex;
int64_t waits_begun = 0;
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
           std::vector<int> ranks) {
  entry_ = new Entry{std::move(describe), std::move(missing), std::move(ranks), now()};
  const std::lock_guard lock(waits_mutex);
  ++waits_begun;
  entries().insert(entry_);
}

Wait::~Wait() {
  const std::lock_guard lock(waits_mutex);
  entries().erase(entry_);
  delete entry_;
}

// Return the ranks of a wait that have left, once some seconds have passed since that was seen.
std::vector<int> Wait::find_left(Entry& wait, const Watcher& watcher) {
  if (now() - wait.since < kShortSeconds * kSeconds) return {};
  std::vector<int> left;
  for (const int rank : wait.ranks) {
    if (watcher.has_left(rank)) left.push_back(rank);
  }
  if (left.empty()) return {};
  if (!wait.left_since) wait.left_since = now();
  if (now() - wait.left_since < kLeftSeconds * kSeconds) return {};
  return left;
}

namespace {

std::string words_of(const std::vector<int>& left) {
  std::string text = left.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < left.size(); ++i) text += (i ? ", " : "") + std::to_string(left[i]);
  return text + (left.size() == 1 ? " has left, and does not come" : " have left, and do not come");
}

}  // namespace

void watch_waits(Watcher watcher) {
  const double stall = seconds_of("JAXMPI_STALL_SECONDS", kStallSeconds);
  const double end_after = seconds_of("JAXMPI_STALL_END_SECONDS", 0);
  std::thread([=] {
    for (;;) {
      usleep(200'000);
      watcher.look();
      std::vector<std::string> reports;
      std::set<int> all_left;
      bool is_over = false;
      {
        const std::lock_guard lock(waits_mutex);
        for (Wait::Entry* entry : Wait::entries()) {
          Wait::Entry& wait = *entry;
          const double waited = (now() - wait.since) / kSeconds;
          const std::vector<int> left = Wait::find_left(wait, watcher);
          all_left.insert(left.begin(), left.end());
          const bool is_too_long = !is_left_to_monitor && end_after > 0 && waited > end_after;
          const bool ends = is_too_long || !left.empty();
          const bool is_late = stall > 0 && waited > stall && !wait.reported;
          if (!ends && !is_late) continue;
          wait.reported = true;
          is_over = is_over || ends;
          char seconds[32];
          std::snprintf(seconds, sizeof seconds, "%.0f", waited);
          std::string text = "has waited " + std::string(seconds) + " s in " + wait.describe();
          const std::string why = left.empty() ? wait.missing() : words_of(left);
          if (!why.empty()) text += "; " + why;
          reports.push_back(text + (ends ? ". It ends the job." : "."));
        }
      }
      for (const std::string& report : reports) watcher.say(report);
      if (is_over) watcher.end(all_left);
    }
  }).detach();
}

std::pair<int64_t, int64_t> count_waits() {
  const std::lock_guard lock(waits_mutex);
  return {waits_begun, static_cast<int64_t>(Wait::entries().size())};
}

void leave_end_to_monitor(bool is_left) { is_left_to_monitor = is_left; }

}  // namespace jaxmpi::mpi
