#include "internode.h"

#include <dlfcn.h>

#include <array>
#include <climits>
#include <stdexcept>

namespace jaxmpi {

using Handle = Nodes::Handle;

struct Nodes::Functions {
  int (*allreduce)(const void*, void*, int, Handle, Handle, Handle);
  int (*reduce_scatter)(const void*, void*, const int*, Handle, Handle, Handle);
  int (*allgatherv)(const void*, int, Handle, void*, const int*, const int*, Handle, Handle);
  int (*op_create)(void (*)(void*, void*, int*, Handle*), int, Handle*);
  int (*error_string)(int, char*, int*);
  std::array<std::array<Handle, 4>, 14> operations;  // by type and op; 0 until one is needed
};

namespace {

constexpr int kErrorBytes = 2048;  // more than any MPI_MAX_ERROR_STRING

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) throw std::runtime_error(std::string("libmpi has no ") + name);
}

// MPI calls an operation without saying which one it is, so each has a function of its own.
template <int type, int op>
void operate(void* in, void* inout, int* n, Handle*) {
  combine_wide(static_cast<Type>(type), static_cast<Op>(op), in, inout, inout, *n);
}

using Operate = void (*)(void*, void*, int*, Handle*);

template <int... i>
constexpr std::array<Operate, sizeof...(i)> operators(std::integer_sequence<int, i...>) {
  return {operate<i / 4, i % 4>...};
}

constexpr auto kOperators = operators(std::make_integer_sequence<int, 14 * 4>());

int count_of(int64_t n) {
  if (n > INT_MAX) throw std::runtime_error("a message of more than 2^31 - 1 items");  // chunks are far smaller
  return static_cast<int>(n);
}

}  // namespace

Nodes::Functions& Nodes::functions() {
  static Functions functions = {};
  return functions;
}

Nodes::Nodes(const std::string& library, const Handles& handles, int node) : handles_(handles), node_(node) {
  void* opened = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!opened) throw std::runtime_error("libmpi cannot be opened: " + std::string(dlerror()));
  Functions& mpi = functions();
  find(opened, "MPI_Allreduce", mpi.allreduce);
  find(opened, "MPI_Reduce_scatter", mpi.reduce_scatter);
  find(opened, "MPI_Allgatherv", mpi.allgatherv);
  find(opened, "MPI_Op_create", mpi.op_create);
  find(opened, "MPI_Error_string", mpi.error_string);
}

void Nodes::check(int code, const char* function) const {
  if (code == 0) return;
  char text[kErrorBytes] = {};
  int length = 0;
  functions().error_string(code, text, &length);
  throw std::runtime_error(std::string(function) + " failed: " + text);
}

Handle Nodes::datatype(Type type) const {
  switch (size_of(type)) {
    case 1: return handles_.bytes[0];
    case 2: return handles_.bytes[1];
    case 4: return handles_.bytes[2];
    case 8: return handles_.bytes[3];
    default: return handles_.bytes[4];
  }
}

Handle Nodes::operation(Type type, Op op) const {
  const int t = static_cast<int>(type), o = static_cast<int>(op);
  Handle& operation = functions().operations[t][o];
  if (!operation) check(functions().op_create(kOperators[4 * t + o], /*commute=*/1, &operation), "MPI_Op_create");
  return operation;
}

Extremes Nodes::extremes(Extremes mine) const {
  const int64_t from[2] = {-mine.smallest, mine.largest};
  int64_t to[2];
  check(functions().allreduce(from, to, 2, handles_.int64, handles_.max, handles_.comm), "MPI_Allreduce");
  return {-to[0], to[1]};
}

void Nodes::allreduce(Type type, Op op, const void* from, void* to, int64_t n) const {
  type = wide(type);
  check(functions().allreduce(from, to, count_of(n), datatype(type), operation(type, op), handles_.comm), "MPI_Allreduce");
}

void Nodes::reduce_scatter(Type type, Op op, const void* from, void* to, int64_t n) const {
  type = wide(type);
  std::vector<int> counts;
  for (int ranks : handles_.ranks) counts.push_back(count_of(ranks * n));
  check(functions().reduce_scatter(from, to, counts.data(), datatype(type), operation(type, op), handles_.comm),
        "MPI_Reduce_scatter");
}

void Nodes::allgather(const void* from, void* to, int64_t n) const {
  std::vector<int> counts, starts;
  int64_t start = 0;
  for (int ranks : handles_.ranks) {
    counts.push_back(count_of(ranks * n));
    starts.push_back(count_of(start));
    start += ranks * n;
  }
  check(functions().allgatherv(from, counts[node_], handles_.bytes[0], to, counts.data(), starts.data(), handles_.bytes[0],
                               handles_.comm),
        "MPI_Allgatherv");
}

}  // namespace jaxmpi
