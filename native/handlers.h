// The handlers of XLA's FFI: one for each way to call a collective, on arrays of the host or of a
// GPU.
#pragma once

#include <cstdint>
#include <string>

namespace jaxmpi::handlers {

// Return the handler of this name, as XLA takes it; throw std::invalid_argument where there is
// none.
void* find(const std::string& name);

// Set the number of this rank, for the handler that returns it to programs.
void set_rank(int32_t rank);

// Return the version of the FFI for which the handlers are compiled.
std::string ffi_version();

}  // namespace jaxmpi::handlers
