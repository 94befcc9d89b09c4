// Messages between the nodes: MPI's point-to-point functions, of the library that runs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace jaxmpi {

// Bytes of the largest message that this sends; a longer one is cut into pieces. MPI sends a longer
// one only once the other side has answered that there is room for it, and the answer waits behind
// what that side sends itself: Open MPI's limit on TCP is 64 KB with the header.
constexpr int64_t kPieceBytes = 60 << 10;

// Nothing here is compiled against an MPI. Handles are pointers in some MPIs and ints in others; as
// an argument, both travel in a register of 64 bits. Arrays of them have the size that the MPI
// gives them.
class Network {
 public:
  using Handle = intptr_t;

  struct Handles {
    Handle comm;        // the communicator of all ranks, or of those of a group
    Handle byte;        // MPI_BYTE
    int request_bytes;  // sizeof(MPI_Request)
  };

  // `library` is the path of libmpi.
  Network(const std::string& library, const Handles& handles);

  // Begin a message. `pending` grows by its pieces, and shrinks as each has been sent from the
  // memory, or has arrived in it. An empty message is none. Both sides give the same number of
  // bytes, or less than a piece.
  void send(int rank, int tag, const void* from, int64_t bytes, int& pending);
  void receive(int rank, int tag, void* to, int64_t bytes, int& pending);

  // Stop counting on `pending`; its messages still complete.
  void forget(int& pending);

  // Let MPI move messages forward; return whether one has completed.
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
