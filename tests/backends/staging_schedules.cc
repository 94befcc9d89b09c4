// Messages of arrays of a GPU, in many orders of what happens when:
// staging_schedules LIBRARY FIRST COUNT. Each seed is a program of messages on
// streams of several contexts; before each, its stream computes what is sent,
// and behind it, it reads what has arrived, and writes over all of it. LIBRARY
// stands in for CUDA's driver.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gpu_staging.h"

using namespace jaxmpi;

namespace {

using Bytes = std::vector<char>;
using Run = void (*)(void* stream, void (*)(void*), void*);

struct Memory {
  Type type;
  int64_t columns;
  Bytes in, out, computed, expected, arrived;
};

// What the other ranks would do: anything that depends on each byte and its
// row.
void other_ranks(const Operation& operation, int ranks, const char* in, char* out, int64_t row) {
  for (int64_t i = 0; i < row; ++i) {
    char sum = 0;
    switch (operation.kind) {
      case Kind::Allreduce: out[i] = static_cast<char>(3 * in[i] + 1); break;
      case Kind::ReduceScatter:
        for (int64_t rank = 0; rank < ranks; ++rank) sum = static_cast<char>(3 * sum + in[rank * row + i]);
        out[i] = sum;
        break;
      case Kind::Allgather:
        for (int64_t rank = 0; rank < ranks; ++rank) out[rank * row + i] = static_cast<char>(in[i] + rank);
        break;
      case Kind::Alltoall:
        for (int64_t rank = 0; rank < ranks; ++rank) out[rank * row + i] = in[(ranks - 1 - rank) * row + i];
        break;
      default: out[i] = static_cast<char>(~in[i]);
    }
  }
}

// A function on a stream.
void later(Run run, void* stream, std::function<void()> function) {
  run(
      stream,
      [](void* argument) {
        const std::unique_ptr<std::function<void()>> held(static_cast<std::function<void()>*>(argument));
        (*held)();
      },
      new std::function<void()>(std::move(function)));
}

struct Outcome {
  int messages = 0, errors = 0, wrong = 0;
};

Outcome schedule(const char* library, void* opened, uint64_t seed, bool fails) {
  std::mt19937_64 random(seed);
  auto drawn = [&](int64_t below) { return static_cast<int64_t>(random() % static_cast<uint64_t>(below)); };
  auto push = reinterpret_cast<int (*)(void*)>(dlsym(opened, "cuCtxPushCurrent_v2"));
  auto pop = reinterpret_cast<int (*)(void**)>(dlsym(opened, "cuCtxPopCurrent_v2"));
  auto make = reinterpret_cast<int (*)(void**, unsigned)>(dlsym(opened, "cuStreamCreate"));
  auto finish = reinterpret_cast<int (*)(void*)>(dlsym(opened, "cuStreamSynchronize"));
  auto run = reinterpret_cast<Run>(dlsym(opened, "stand_in_run"));
  reinterpret_cast<void (*)(uint64_t)>(dlsym(opened, "stand_in_seed"))(seed);

  unsetenv("CUDA_FAILS_IN");
  drawn(4) ? unsetenv("CUDA_NO_KERNELS") : setenv("CUDA_NO_KERNELS", "1", 1);
  std::vector<void*> streams;
  static intptr_t contexts = 1000;  // no schedule has those of another, which may be broken
  for (int64_t context = 0, count = 1 + drawn(2); context < count; ++context) {
    push(reinterpret_cast<void*>(++contexts));
    for (int64_t stream = 0, several = 1 + drawn(2); stream < several; ++stream) make(&streams.emplace_back(), 1);
    void* popped;
    pop(&popped);
  }
  if (fails) setenv("CUDA_FAILS_IN", std::to_string(20 + drawn(300)).c_str(), 1);

  Outcome outcome;
  Staging staging(library, 1 << (9 + drawn(4)));
  std::vector<std::unique_ptr<std::vector<Memory>>> programs;
  for (int64_t message = 0, messages = 1 + drawn(5); message < messages; ++message) {
    void* stream = streams[static_cast<size_t>(drawn(static_cast<int64_t>(streams.size())))];
    const Operation operation = {static_cast<Kind>(drawn(6)), Op::Sum, 1, 0, 0};
    const int ranks = 1 + static_cast<int>(drawn(4));
    const bool in_place = operation.kind == Kind::Allreduce && drawn(2);
    const int64_t rows_in = operation.kind == Kind::ReduceScatter || operation.kind == Kind::Alltoall ? ranks : 1;
    const int64_t rows_out = operation.kind == Kind::Allgather || operation.kind == Kind::Alltoall ? ranks : 1;
    auto& memories = *programs.emplace_back(std::make_unique<std::vector<Memory>>(static_cast<size_t>(drawn(12))));
    std::vector<Array> arrays;
    for (Memory& memory : memories) {
      memory.type = static_cast<Type>(drawn(14));
      memory.columns = 1 + (drawn(4) ? drawn(50) : drawn(2000));
      const int64_t row = memory.columns * size_of(memory.type);
      memory.in.resize(static_cast<size_t>(rows_in * row));
      memory.out.resize(static_cast<size_t>(rows_out * row));
      memory.computed.resize(memory.in.size());
      for (char& byte : memory.computed) byte = static_cast<char>(random());
      memory.expected.resize(memory.out.size());
      other_ranks(operation, ranks, memory.computed.data(), memory.expected.data(), row);
      arrays.push_back({memory.type, memory.in.data(), in_place ? memory.in.data() : memory.out.data(), memory.columns});
    }

    later(run, stream, [&memories] {
      for (Memory& memory : memories) memory.in = memory.computed;
    });
    int begun = 0;
    const bool disagrees = !drawn(8);
    auto begin = [&] { ++begun; };
    auto carry = [&](std::vector<Array> staged) {
      if (begun != 1) ++outcome.wrong;
      if (disagrees && drawn(2)) throw std::runtime_error("the ranks do not do the same");
      for (const Array& array : staged) {
        other_ranks(operation, ranks, array.in, array.out, array.columns * size_of(array.type));
      }
    };
    ++outcome.messages;
    try {
      if (drawn(3)) {
        staging.run(operation, ranks, arrays, stream, begin, carry);
      } else {
        const Staging::Ready ready = staging.ready(stream);
        later(run, stream, [] {});  // what does not need the message
        void* other = streams[static_cast<size_t>(drawn(static_cast<int64_t>(streams.size())))];
        std::exception_ptr failure;
        std::thread communication([&] {
          try {
            staging.run_overlapped(ready, operation, ranks, arrays, begin, carry);
          } catch (...) {
            failure = std::current_exception();
          }
        });
        try {
          staging.ready(other);  // of a message that is dropped before it is carried
        } catch (const std::runtime_error&) {
          if (!fails) ++outcome.wrong;
        }
        communication.join();
        if (failure) std::rethrow_exception(failure);
        for (size_t i = 0; i < memories.size(); ++i) {
          if (std::memcmp(arrays[i].out, memories[i].expected.data(), memories[i].expected.size()) != 0) ++outcome.wrong;
        }
      }
    } catch (const std::runtime_error&) {
      ++outcome.errors;
      finish(stream);
      memories.clear();  // XLA frees the arrays
      if (!fails && !disagrees) ++outcome.wrong;
      continue;
    }
    later(run, stream, [&memories, in_place] {
      for (Memory& memory : memories) {
        memory.arrived = in_place ? memory.in : memory.out;
        for (Bytes* bytes : {&memory.in, &memory.out}) {
          for (char& byte : *bytes) byte = static_cast<char>(byte + 101);
        }
      }
    });
  }
  unsetenv("CUDA_FAILS_IN");
  for (void* stream : streams) finish(stream);
  for (const auto& memories : programs) {
    for (const Memory& memory : *memories) {
      if (!memory.arrived.empty() && memory.arrived != memory.expected) ++outcome.wrong;
    }
  }
  return outcome;
}

}  // namespace

int main(int, char** arguments) {
  const char* library = arguments[1];
  const auto first = std::stoull(arguments[2]), count = std::stoull(arguments[3]);
  void* opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  setenv("CUDA_SEED", "0", 1);
  Outcome all;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const Outcome one = schedule(library, opened, seed, seed % 4 == 3);
    if (one.wrong) std::printf("seed %llu: %d wrong\n", static_cast<unsigned long long>(seed), one.wrong);
    all.messages += one.messages;
    all.errors += one.errors;
    all.wrong += one.wrong;
  }
  std::printf("%llu schedules, %d messages, %d errors, %d wrong\n", static_cast<unsigned long long>(count), all.messages,
              all.errors, all.wrong);
  return all.wrong != 0;
}
