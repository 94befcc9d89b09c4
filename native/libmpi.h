// The functions of the MPI library that runs. Nothing here is compiled against an MPI.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace jaxmpi::mpi {

// A handle is a pointer in some MPIs and an int in others; as an argument, both travel in a
// register of 64 bits. Where MPI writes one, the 8 bytes are zero before.
using Handle = intptr_t;

constexpr int kThreadMultiple = 3;  // MPI_THREAD_MULTIPLE of Open MPI and MPICH
constexpr int kStatusBytes = 64;    // more than any MPI_Status

struct Library {
  std::string path;
  Handle world, byte;  // MPI_COMM_WORLD, MPI_BYTE
  int request_bytes;   // sizeof(MPI_Request)

  int (*initialized)(int*);
  int (*init_thread)(int*, char***, int, int*);
  int (*query_thread)(int*);
  int (*finalized)(int*);
  int (*finalize)();
  int (*abort)(Handle, int);
  int (*comm_rank)(Handle, int*);
  int (*comm_size)(Handle, int*);
  int (*comm_dup)(Handle, Handle*);
  int (*comm_group)(Handle, Handle*);
  int (*group_incl)(Handle, int, const int*, Handle*);
  int (*group_free)(Handle*);
  int (*comm_create_group)(Handle, Handle, int, Handle*);
  int (*allgather)(const void*, int, Handle, void*, int, Handle, Handle);
  int (*isend)(const void*, int, Handle, int, int, Handle, void*);
  int (*irecv)(void*, int, Handle, int, int, Handle, void*);
  int (*test)(void*, int*, void*);
  int (*iprobe)(int, int, Handle, int*, void*);
  int (*error_string)(int, char*, int*);
};

// Open the MPI library of this job: the one that the process has loaded already, or the one that
// JAXMPI_LIBMPI names, or the one of this Python's environment, or the system's. Throw a
// std::runtime_error where there is none, or it is neither Open MPI's nor MPICH's.
Library open_library();

// Throw a std::runtime_error with MPI's own words if the code is not 0.
void check(const Library& library, int code, const char* function);

}  // namespace jaxmpi::mpi
