// The ranks of a job that plain JAX programs run on, and their groups: one for each communicator.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "libmpi.h"
#include "transport.h"

namespace jaxmpi::mpi {

// Some ranks, with what they communicate with. Each has the same members in the same order.
struct Group {
  std::vector<int> members;  // ranks of the job
  int me = 0;                // this rank's place among them
  // Of two members and more
  std::unique_ptr<Transport> transport;
  std::mutex turn;      // the transport carries one message at a time
  Handle messages = 0;  // the communicator for messages from rank to rank

  int size() const { return static_cast<int>(members.size()); }
};

// This rank's job, from MPI_Init on. There is one, which is never destroyed.
class Job {
 public:
  // Start MPI unless it runs already, and exchange where the ranks are. Collective.
  Job();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(nodes_.size()); }
  bool started_mpi() const { return started_; }
  bool crowded() const { return crowded_; }
  const Library& library() const { return library_; }

  // Return the group of some ranks, which is made at the first call. Collective: all of them call
  // it, on any thread; ranks that do not belong to it have no part in it.
  Group& group(const std::vector<int>& members);

  // End all ranks of the job.
  [[noreturn]] void abort(int code) const;

 private:
  struct Place {
    std::once_flag made;
    std::unique_ptr<Group> group;
  };

  std::unique_ptr<Group> make(const std::vector<int>& members);
  std::unique_ptr<Transport> connect(const Group& group, Handle comm);
  Handle split(const std::vector<int>& members, int tag);

  Library library_;
  bool started_ = false, crowded_ = false;
  int rank_ = 0, threads_ = 1;
  int64_t largest_node_ = 1;  // ranks
  Handle world_ = 0;
  std::vector<int> nodes_;  // of each rank
  std::mutex mutex_;
  std::map<std::vector<int>, Place> groups_;
};

}  // namespace jaxmpi::mpi
