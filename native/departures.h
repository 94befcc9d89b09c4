// Which ranks have come to their ends, while others may wait for them.
#pragma once

#include <vector>

#include "libmpi.h"

namespace jaxmpi::mpi {

// A rank that has left tells the next kMostTold ranks, with a message without content to each. In
// larger jobs the ranks after these do not learn it: a collective in which they wait for it ends
// only if one of the kMostTold waits, too.
class Departures {
 public:
  static constexpr int kMostTold = 64;

  Departures(const Library& library, Handle comm, int rank, int size);

  // Send the messages.
  void tell();

  // Return whether all messages are on their way; if not, call it again later. (MPI opens a
  // connection only while it is called.)
  bool have_told();

  // Return whether a rank has told this one that it has left. The message is not received: it is
  // there at each call.
  bool has_left(int rank) const;

 private:
  struct Request {
    alignas(void*) char bytes[sizeof(void*)];
  };

  const Library& library_;
  Handle comm_;
  int rank_, size_;
  std::vector<Request> requests_;  // of the messages that are not on their way yet
};

}  // namespace jaxmpi::mpi
