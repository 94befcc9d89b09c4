// What XLA calls: a handler of its FFI for each kind of call, on arrays of the host and of a GPU.
#pragma once

#include <cstdint>
#include <string>

namespace jaxmpi::handlers {

// The handler of this name, as XLA takes it; throws std::invalid_argument where there is none.
void* find(const std::string& name);

// The number of this rank, for the handler that tells it to programs.
void set_rank(int32_t rank);

// The version of the FFI that they are compiled for.
std::string ffi_version();

}  // namespace jaxmpi::handlers
