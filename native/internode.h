// Messages between the nodes: MPI's point-to-point functions, of the library that runs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace jaxmpi {

// Nothing here is compiled against an MPI. Handles are pointers in some MPIs and ints in others; as
// an argument, both travel in a register of 64 bits. Arrays of them have the size that the MPI
// gives them.
class Network {
 public:
  using Handle = intptr_t;

  struct Handles {
    Handle
        comm;  // of all ranks, by their ranks in the job, or of those of a group, by theirs in it
    Handle byte;        // datatype
    int request_bytes;  // of the handle of a request
  };

  // library: the path of libmpi.
  Network(const std::string& library, const Handles& handles);

  // Begin a message. It adds 1 to `pending`, and takes it away again when the memory is free to
  // use, or has arrived. An empty one is none. Both sides name the same number of bytes, or they
  // are fewer than a piece.
  void send(int rank, int tag, const void* from, int64_t bytes, int& pending);
  void receive(int rank, int tag, void* to, int64_t bytes, int& pending);

  // Let those that count on `pending` come to an end without it.
  void forget(int& pending);

  // Let messages move on; returns whether one of them is complete now.
  bool progress();

 private:
  void* add(int& pending);
  void check(int code, const char* function) const;

  struct Functions;
  static Functions& functions();
  Handles handles_;
  std::vector<char> requests_;  // an array of handles
  std::vector<int*> pending_;   // of each request
  int forgotten_ = 0;
  std::vector<int> completed_;
  std::vector<char> statuses_;
};

}  // namespace jaxmpi
