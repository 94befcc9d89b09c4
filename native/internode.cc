#include "internode.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <utility>

namespace jaxmpi {

using Handle = Network::Handle;

struct Network::Functions {
  int (*isend)(const void*, int, Handle, int, int, Handle, void*);
  int (*irecv)(void*, int, Handle, int, int, Handle, void*);
  int (*testsome)(int, void*, int*, int*, void*);
  int (*error_string)(int, char*, int*);
};

namespace {

constexpr int kErrorBytes = 2048;  // more than any MPI_MAX_ERROR_STRING
constexpr int kStatusBytes = 64;   // more than any MPI_Status

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) throw std::runtime_error(std::string("libmpi has no ") + name);
}

// Call function(begin, bytes) for each piece of a message. MPI keeps their order.
template <class Function>
void each_piece(int64_t bytes, Function function) {
  for (int64_t begin = 0; begin < bytes; begin += kPieceBytes) {
    function(begin, static_cast<int>(std::min(kPieceBytes, bytes - begin)));
  }
}

}  // namespace

Network::Functions& Network::functions() {
  static Functions functions = {};
  return functions;
}

Network::Network(const std::string& library, const Handles& handles) : handles_(handles) {
  void* opened = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!opened) throw std::runtime_error("libmpi cannot be opened: " + std::string(dlerror()));
  Functions& mpi = functions();
  find(opened, "MPI_Isend", mpi.isend);
  find(opened, "MPI_Irecv", mpi.irecv);
  find(opened, "MPI_Testsome", mpi.testsome);
  find(opened, "MPI_Error_string", mpi.error_string);
}

void Network::check(int code, const char* function) const {
  if (code == 0) return;
  char text[kErrorBytes] = {};
  int length = 0;
  functions().error_string(code, text, &length);
  throw std::runtime_error(std::string(function) + " failed: " + text);
}

// Return room for one more request, which counts on `pending` until it completes.
void* Network::add(int& pending) {
  const size_t bytes = handles_.request_bytes, index = pending_.size();
  requests_.resize((index + 1) * bytes);
  completed_.resize(index + 1);
  statuses_.resize((index + 1) * kStatusBytes);
  pending_.push_back(&pending);
  ++pending;
  return requests_.data() + index * bytes;
}

void Network::send(int rank, int tag, const void* from, int64_t bytes, int& pending) {
  each_piece(bytes, [&](int64_t begin, int count) {
    const void* piece = static_cast<const char*>(from) + begin;
    check(functions().isend(piece, count, handles_.byte, rank, tag, handles_.comm, add(pending)),
          "MPI_Isend");
  });
}

void Network::receive(int rank, int tag, void* to, int64_t bytes, int& pending) {
  each_piece(bytes, [&](int64_t begin, int count) {
    void* piece = static_cast<char*>(to) + begin;
    check(functions().irecv(piece, count, handles_.byte, rank, tag, handles_.comm, add(pending)),
          "MPI_Irecv");
  });
}

// The requests still count, but on `forgotten_`: MPI needs them until they complete.
void Network::forget(int& pending) {
  forgotten_ += std::exchange(pending, 0);
  std::replace(pending_.begin(), pending_.end(), &pending, &forgotten_);
}

bool Network::progress() {
  if (pending_.empty()) return false;
  int count = 0;
  check(functions().testsome(static_cast<int>(pending_.size()), requests_.data(), &count,
                             completed_.data(), statuses_.data()),
        "MPI_Testsome");
  if (count <= 0) return false;
  // Fill the gap of each completed request with the last one of the array. From the highest index
  // down, the last one is never itself completed and still to be removed.
  std::sort(completed_.begin(), completed_.begin() + count, std::greater<int>());
  const size_t bytes = handles_.request_bytes;
  for (int i = 0; i < count; ++i) {
    const int at = completed_[i], last = static_cast<int>(pending_.size()) - 1;
    --*pending_[at];
    if (at != last)
      std::memcpy(requests_.data() + at * bytes, requests_.data() + last * bytes, bytes);
    pending_[at] = pending_[last];
    pending_.pop_back();
    requests_.resize(last * bytes);
  }
  return true;
}

}  // namespace jaxmpi
