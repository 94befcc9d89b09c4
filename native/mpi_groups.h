// The ranks of a job that plain JAX programs run on, and their groups: one for each communicator.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "departures.h"
#include "libmpi.h"
#include "transport.h"

namespace jaxmpi::mpi {

// What a rank tells the others of itself.
struct Member {
  int64_t pid;
  char host[65];
};

// This rank among those of its job.
struct JobPlace {
  int rank = 0;
  std::vector<Member> members;  // of all ranks
  uint64_t token = 0;           // equal on all ranks, and nobody else knows it
  int64_t zero_ns = 0;          // now(), at a moment at which all ranks have met
};

// Some ranks, with what they communicate with. Each of them lists the members in the same order.
struct Group {
  std::vector<int> members;  // ranks of the job
  int rank = 0;              // this rank's place among them
  // Of two members and more
  std::unique_ptr<Transport> transport;
  std::mutex mutex;                     // the transport carries one message at a time
  std::atomic<bool> is_inside = false;  // one is under way, and on record
  bool spans_nodes = false;
  uint64_t hash_of_members = 0;  // equal on all members
  Handle point_to_point = 0;     // the communicator for messages from rank to rank
  std::atomic<int> users = 0;    // communicators of XLA that it carries

  int size() const { return static_cast<int>(members.size()); }
};

// This rank's job, from MPI_Init on. There is one, which is never destroyed.
class Job {
 public:
  // Start MPI unless it runs already.
  Job();

  // Exchange where the ranks are. Collective; the rest needs it.
  void join();

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool started_mpi() const { return started_; }
  bool crowded() const { return crowded_; }
  const JobPlace& place() const { return place_; }  // after `join`
  const Library& library() const { return library_; }

  // Return the group of some ranks, which is made at the first call.
  // Collective over `members` only. Several threads may call it; the group is made once.
  Group& group(const std::vector<int>& members);

  // Return whether XLA has a communicator of some ranks.
  bool has_users(const std::vector<int>& members);

  // Note on record that this rank waits for a message of another one, or no longer.
  void expect(int rank);
  void expect_no_more(int rank);

  // Return the ranks that this one waits for now, as far as the waits are on record; nothing where
  // that is not known, as it may be for a collective with ranks of other nodes.
  std::optional<std::vector<int>> missing_ranks();

  // Let the other ranks of this node know that no collective of this rank will come: one that waits
  // for it there throws RankLost. It is not taken back.
  void leave_node();

  // Let the ranks of other nodes know, too. Return whether all have been told; if not, call it
  // again later.
  bool leave();

  // Return whether another rank has told this one that it has left.
  bool has_left(int rank);

  // End all ranks of the job.
  [[noreturn]] void abort(int code) const;

 private:
  struct Slot {
    std::once_flag made;
    std::unique_ptr<Group> group;
  };

  std::unique_ptr<Group> make(const std::vector<int>& members);
  std::unique_ptr<Transport> connect(const Group& group, Handle comm);
  Handle split(const std::vector<int>& members, int tag);

  Library library_;
  bool started_ = false, crowded_ = false;
  int rank_ = 0, size_ = 0, threads_ = 1;
  int64_t largest_node_ = 1;  // ranks
  Handle world_ = 0;
  std::optional<Departures> departures_;  // from `join` on
  bool leaves_ = false;
  std::vector<int> nodes_;  // of each rank
  JobPlace place_;
  std::mutex mutex_;
  std::map<std::vector<int>, Slot> groups_;
  std::multiset<int> expected_;  // ranks of which messages are awaited
};

}  // namespace jaxmpi::mpi
