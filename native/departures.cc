#include "departures.h"

#include <algorithm>

namespace jaxmpi::mpi {
namespace {

constexpr int kTag = 1;

}  // namespace

Departures::Departures(const Library& library, Handle comm, int rank, int size)
    : library_(library), comm_(comm), rank_(rank), size_(size) {}

void Departures::tell() {
  requests_.resize(static_cast<size_t>(std::min(kMostTold, size_ - 1)));
  int other = rank_;
  for (Request& request : requests_) {
    other = (other + 1) % size_;
    check(library_, library_.isend(nullptr, 0, library_.byte, other, kTag, comm_, request.bytes),
          "MPI_Isend");
  }
}

bool Departures::have_told() {
  const auto is_sent = [this](Request& request) {
    int done = 0;
    alignas(int64_t) char status[kStatusBytes];
    check(library_, library_.test(request.bytes, &done, status), "MPI_Test");
    return done != 0;
  };
  requests_.erase(std::remove_if(requests_.begin(), requests_.end(), is_sent), requests_.end());
  return requests_.empty();
}

bool Departures::has_left(int rank) const {
  const int distance = (rank_ - rank + size_) % size_;
  if (distance < 1 || distance > kMostTold) return false;
  int found = 0;
  alignas(int64_t) char status[kStatusBytes];
  // An error is no news of the rank: the launcher, or a collective, finds one that has failed.
  return library_.iprobe(rank, kTag, comm_, &found, status) == 0 && found;
}

}  // namespace jaxmpi::mpi
