// The handlers of XLA's FFI for codecs.int8. They communicate with nobody.
#pragma once

#include <string>

namespace jaxmpi::int8 {

// Return the handler of this name, as XLA takes it; null where there is none.
void* find_handler(const std::string& name);

}  // namespace jaxmpi::int8
