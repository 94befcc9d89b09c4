// The library that jaxlib's MPItrampoline opens, by MPITRAMPOLINE_LIB: JAX's own collectives on
// CPUs, carried by the native transport.
//
// jaxlib is compiled against MPItrampoline, whose functions MPI_X call MPIABI_X of this library.
// MPItrampoline resolves about 640 symbols when jaxlib is loaded. XLA calls about 20 of them
// (mpi_abi.cc); generate_mpi_stubs.py makes the others from the table mpi_symbols.txt.
//
// Handles are numbers of this library; MPI's own are not seen by XLA.
#pragma once

#include <cstdint>

namespace jaxmpi::mpi {

// Storage of one MPI constant. MPItrampoline reads its first word once, as an integer or as a
// pointer, depending on the constant.
struct Constant {
  uintptr_t value, rest;
};

// Say that XLA has called a function which this library does not have, and end the job.
[[noreturn]] void refuse(const char* function);

}  // namespace jaxmpi::mpi
