// Which devices belong to the communicator that XLA is about to make.
#pragma once

#include <cstdint>
#include <vector>

namespace jaxmpi::mpi {

// Return the devices of a communicator, by their place in it; empty if they cannot be found.
//
// XLA passes two numbers to MPI_Comm_split: the first device of the communicator as color, and the
// place of this process's device as key. They do not say which ranks belong to it: in a mesh of
// 2 x 2, the row {0, 1} and the column {0, 2} both have color 0. MPI finds out only if all ranks of
// the job split at the same time, in one order, which ranks outside of a mesh never do. But XLA
// calls from a function that has the communicator's `xla::cpu::CpuCliqueKey` as argument, and this
// is an object of a class with virtual functions: it points to the name of its class. So it is
// searched on the stack, in the frames of the functions that have called; `caller` is an address in
// their code.
std::vector<int32_t> find_clique(int32_t first_device, int key, const void* caller);

}  // namespace jaxmpi::mpi
