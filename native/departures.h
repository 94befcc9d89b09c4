// Which ranks have come to their ends, while others may wait for them.
#pragma once

#include <vector>

#include "libmpi.h"

namespace jaxmpi::mpi {

// A rank tells the next kMostTold ranks that it has left, with a message without content to each:
// where ranks wait for it, one of these is among them, unless the job has more ranks and only a few
// of them communicate.
class Departures {
 public:
  static constexpr int kMostTold = 64;

  Departures(const Library& library, Handle comm, int rank, int size);

  // Send the messages.
  void tell();

  // Let MPI carry on with the messages, and return whether all are on their way. One to a rank to
  // which no connection is open needs it.
  bool have_told();

  // Return whether a rank has told this one that it has left.
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
