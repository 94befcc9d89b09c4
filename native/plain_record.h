// The records of a rank that has no monitor, because its program does not import jaxmpi:
//
//   live record    for `jaxmpi top`: the file without a name "jaxmpi-rank", with a JSON object, as
//                  jaxmpi/_job/process/live_record.py describes it
//   flight record  for `jaxmpi timeline`: rank-N.json, as jaxmpi/_job/monitor/flight_recorder.py
//                  writes it
//
// Both show the messages of record.h.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace jaxmpi::mpi {

// What the ranks know of each other.
struct Member {
  int64_t pid;
  char host[65];
};
struct JobPlace {
  int rank = 0;
  std::vector<Member> members;  // of all ranks
  uint64_t token = 0;           // equal on all ranks, and nobody else knows it
  int64_t zero_ns = 0;          // now(), at a moment at which all ranks have met
};

class PlainRecord {
 public:
  // `waits_for` returns the ranks that this one waits for.
  PlainRecord(JobPlace place, std::function<std::vector<int>()> waits_for);

  // Name the messages of a fingerprint, at the first one.
  void name(int64_t fingerprint, const std::function<std::string()>& describe);

  // Write the live record.
  void show();

  // Write the flight record, over an earlier one. Return a sentence: where it is, or why it cannot
  // be written. It goes into the folder JAXMPI_FLIGHT_DIR, or into a private one in the temporary
  // folder.
  std::string dump(const std::string& why);

 private:
  std::string name_of(int64_t fingerprint);
  std::string flight_record(const std::string& why);

  const JobPlace place_;
  const std::function<std::vector<int>()> waits_for_;
  const double began_;  // seconds since 1970
  int file_;            // of the live record; -1 where there is none
  std::mutex mutex_;
  std::map<int64_t, std::string> names_;  // by fingerprint
};

}  // namespace jaxmpi::mpi
