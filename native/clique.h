// Which devices belong to the communicator that XLA is about to make.
#pragma once

#include <cstdint>
#include <vector>

namespace jaxmpi::mpi {

// Return the cliques on this thread's stack that the communicator may be: their devices, by their
// place in the communicator. All differ, begin with `first_device`, and have a place `key`; the
// innermost comes first. Throw a std::runtime_error where this process cannot read its own memory.
//
// XLA passes two numbers to MPI_Comm_split: the first device of the communicator as color, and the
// place of this process's device as key. They do not say which ranks belong to it: in a mesh of
// 2 x 2, the row {0, 1} and the column {0, 2} both have color 0. MPI finds out only if all ranks of
// the job split at the same time, in one order, which ranks outside of a mesh never do. But XLA
// calls from a function that has the communicator's `xla::cpu::CpuCliqueKey` as argument, and this
// is an object of a class with virtual functions: it points to the name of its class. So it is
// searched in the registers and on the stack, in the frames of the functions that have called;
// `caller` is an address in their code.
//
// The hazard: a frame also has slots that nothing has been written to since an earlier call, and
// such a slot may still point to the key of an earlier communicator, which XLA keeps. On rank 0 of
// the mesh above, which has made {0, 1} and makes {0, 2}, a leftover pointer to {0, 1} passes every
// test of color and key. So all cliques that fit are returned, and `choose_clique` decides.
std::vector<std::vector<int32_t>> find_cliques(int32_t first_device, int key, const void* caller);

// Return the clique among those found for which XLA asks, or nullptr if that cannot be told.
//
// XLA asks once for each clique and keeps the communicator, and a key that an earlier call has left
// on the stack is that of a clique it asked for. So where several cliques fit, the one that is
// asked for is the only one without a communicator: `is_in_use(devices)` says whether a clique has
// one. If none or several are without, nothing tells them apart, and a guess could give wrong sums.
template <class Predicate>
const std::vector<int32_t>* choose_clique(const std::vector<std::vector<int32_t>>& found,
                                          Predicate is_in_use) {
  if (found.size() == 1) return &found.front();
  const std::vector<int32_t>* chosen = nullptr;
  for (const auto& devices : found) {
    if (is_in_use(devices)) continue;
    if (chosen) return nullptr;
    chosen = &devices;
  }
  return chosen;
}

}  // namespace jaxmpi::mpi
