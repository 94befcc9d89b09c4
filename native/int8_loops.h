// The functions of int8.h: one set of loops for each kind of processor.
#pragma once

#include "int8.h"

namespace jaxmpi::int8 {

struct Loops {
  decltype(&::jaxmpi::int8::encode) encode;
  decltype(&::jaxmpi::int8::encode_mean) encode_mean;
  decltype(&::jaxmpi::int8::decode) decode;
};

namespace v1 {
extern const Loops loops;  // any processor
}
namespace v3 {
extern const Loops loops;  // x86-64 with AVX2
}
namespace v4 {
extern const Loops loops;  // x86-64 with AVX-512
}

}  // namespace jaxmpi::int8
