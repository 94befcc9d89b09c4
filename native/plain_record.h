// The records of a rank that has no monitor, because it has not called jaxmpi.init:
//
//   live record    for `jaxmpi top`: the memfd "jaxmpi-rank", with a JSON object, as
//                  jaxmpi/_job/process/live_record.py describes it
//   flight record  for `jaxmpi timeline`: rank-N.json, as jaxmpi/_job/monitor/flight_recorder.py
//                  writes it
//   run record     for `jaxmpi run`: rank-N.json in its folder, as jaxmpi/_job/process/run_dir.py
//                  reads it, by which it knows the rank of a process
//
// The first two show the messages of record.h.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "mpi_groups.h"

namespace jaxmpi::mpi {

class PlainRecord {
 public:
  // `waits_for` returns the ranks that this one waits for, or nothing if that is not known.
  PlainRecord(JobPlace place, std::function<std::optional<std::vector<int>>()> waits_for);

  // Name the messages of a fingerprint, at the first one.
  void name(int64_t fingerprint, const std::function<std::string()>& describe);

  // Write the live record.
  void show();

  // Write no live and no run record any more: the rank has a monitor now, which writes its own.
  void hide();

  // Note in the run record that the process ends in order.
  void leave_run();

  // Write the flight record, over an earlier one; return its path. Its folder is JAXMPI_FLIGHT_DIR,
  // or a private one in the temporary folder. Throw an error where it cannot be written, or not in
  // some seconds.
  std::string dump(const std::string& why);

  // Whether the user has named a folder for the records.
  bool has_named_folder() const { return has_named_folder_; }

 private:
  void write_run_record(bool has_left);
  std::string name_of(int64_t fingerprint);
  std::string flight_record(const std::string& why);
  void write_flight_record(const std::string& why);

  const JobPlace place_;
  const std::function<std::optional<std::vector<int>>()> waits_for_;
  const int64_t began_us_;  // microseconds since 1970
  std::string hosts_;       // of all ranks, as JSON
  bool has_named_folder_;
  std::string folder_, inner_;  // of the flight record; "" or the folder in it, of a restarted job
  std::mutex mutex_;            // of what follows
  std::map<int64_t, std::string> names_;  // by fingerprint
  int file_;                              // of the live record; -1 where there is none
  std::string run_folder_;                // of the run record; "" where there is none
  std::timed_mutex dumping_;
};

}  // namespace jaxmpi::mpi
