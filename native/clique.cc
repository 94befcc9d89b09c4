#include "clique.h"

#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

namespace jaxmpi::mpi {
namespace {

constexpr std::string_view kClass = "N3xla3cpu12CpuCliqueKeyE";  // as the compiler writes it
constexpr size_t kFrames = 64 << 10;                             // bytes of the stack to search
constexpr size_t kMostDevices = 1 << 20;

struct Module {
  uintptr_t within, begin, end;
};

// Find the memory of the module that has an address of code.
Module module_of(const void* code) {
  Module module = {reinterpret_cast<uintptr_t>(code), 0, 0};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        Module& module = *static_cast<Module*>(data);
        uintptr_t begin = UINTPTR_MAX, end = 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& segment = info->dlpi_phdr[i];
          if (segment.p_type != PT_LOAD) continue;
          begin = std::min<uintptr_t>(begin, info->dlpi_addr + segment.p_vaddr);
          end = std::max<uintptr_t>(end, info->dlpi_addr + segment.p_vaddr + segment.p_memsz);
        }
        if (module.within < begin || module.within >= end) return 0;
        module.begin = begin;
        module.end = end;
        return 1;
      },
      &module);
  return module;
}

// Reads memory at addresses that this process may not have.
//
// process_vm_readv does, but a container may forbid it (seccomp, gVisor). Then the bytes go through
// a pipe: write() returns EFAULT where a plain load would end the process.
class Reader {
 public:
  Reader() = default;
  ~Reader() {
    for (int end : pipe_) {
      if (end >= 0) close(end);
    }
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  // Copy memory, and return whether this process has it.
  bool read_memory(uintptr_t from, void* to, size_t bytes) {
    if (pipe_[0] >= 0) return read_by_pipe(from, static_cast<char*>(to), bytes);
    iovec local = {to, bytes}, remote = {reinterpret_cast<void*>(from), bytes};
    const ssize_t done = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
    if (done >= 0 || (errno != EPERM && errno != ENOSYS && errno != EACCES))
      return done == static_cast<ssize_t>(bytes);
    const std::string reason = std::strerror(errno);
    if (pipe2(pipe_, O_CLOEXEC | O_NONBLOCK) != 0)
      throw std::runtime_error("process_vm_readv is forbidden here (" + reason +
                               "), and a pipe in its place cannot be opened (" +
                               std::strerror(errno) +
                               "). Allow it, or set JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo.");
    return read_by_pipe(from, static_cast<char*>(to), bytes);
  }

 private:
  bool read_by_pipe(uintptr_t from, char* to, size_t bytes) {
    for (size_t at = 0; at < bytes;) {
      const size_t part = std::min<size_t>(bytes - at, PIPE_BUF);
      const ssize_t written = write(pipe_[1], reinterpret_cast<const void*>(from + at), part);
      if (written <= 0) return false;
      // What was written must leave the pipe, also where the memory ends within this part.
      if (read(pipe_[0], to + at, static_cast<size_t>(written)) != written) return false;
      if (written != static_cast<ssize_t>(part)) return false;
      at += part;
    }
    return true;
  }

  int pipe_[2] = {-1, -1};
};

// A CliqueKey: the pointer that all classes with virtual functions begin with, and a std::vector.
struct Object {
  uintptr_t functions, begin, end, capacity;
};

// Whether `functions` are those of the class that is searched.
bool is_clique(Reader& reader, const Module& module, uintptr_t functions) {
  auto has = [&](uintptr_t address) {
    return address >= module.begin + sizeof(uintptr_t) && address + sizeof(Object) < module.end &&
           address % alignof(uintptr_t) == 0;
  };
  if (!has(functions)) return false;
  // In front of the functions is the type's description; its second entry is the name.
  uintptr_t type = 0, name = 0;
  char text[kClass.size() + 1] = {};
  return reader.read_memory(functions - sizeof type, &type, sizeof type) && has(type) &&
         reader.read_memory(type + sizeof type, &name, sizeof name) && name >= module.begin &&
         name + sizeof text < module.end && reader.read_memory(name, text, sizeof text) &&
         kClass == std::string_view(text, sizeof text - 1) && text[sizeof text - 1] == 0;
}

// Return the devices of a clique; empty if it is not one with this first device and this place.
std::vector<int32_t> devices_of(Reader& reader, const Object& object, int32_t first_device,
                                int key) {
  const size_t bytes = object.end - object.begin;
  if (object.end <= object.begin || object.capacity < object.end || bytes % sizeof(int32_t) ||
      bytes > kMostDevices * sizeof(int32_t))
    return {};
  std::vector<int32_t> devices(bytes / sizeof(int32_t));
  if (!reader.read_memory(object.begin, devices.data(), bytes)) return {};
  const bool fits =
      devices.front() == first_device && key >= 0 && key < static_cast<int>(devices.size());
  if (!fits) return {};
  std::vector<int32_t> sorted = devices;
  std::sort(sorted.begin(), sorted.end());
  const bool distinct = std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
  return distinct && sorted.front() >= 0 ? devices : std::vector<int32_t>();
}

}  // namespace

std::vector<std::vector<int32_t>> find_cliques(int32_t first_device, int key, const void* caller) {
  // The functions that have called may keep the key in a register, which is on the stack only if a
  // function further in has saved it. This puts all registers into this frame.
  ucontext_t registers;
  getcontext(&registers);
  const Module module = module_of(caller);
  pthread_attr_t attributes;
  if (!module.end || pthread_getattr_np(pthread_self(), &attributes) != 0) return {};
  void* lowest = nullptr;
  size_t bytes = 0;
  pthread_attr_getstack(&attributes, &lowest, &bytes);
  pthread_attr_destroy(&attributes);
  const auto top = reinterpret_cast<uintptr_t>(lowest) + bytes;
  const auto here = reinterpret_cast<uintptr_t>(&registers);
  if (here < reinterpret_cast<uintptr_t>(lowest) || here >= top) return {};
  Reader reader;
  std::vector<uintptr_t> words(std::min(kFrames, top - here) / sizeof(uintptr_t));
  if (!reader.read_memory(here, words.data(), words.size() * sizeof(uintptr_t))) return {};
  // All of it: the innermost slot that fits may be one that an earlier call has left.
  std::vector<std::vector<int32_t>> found;
  for (size_t i = 0; i < words.size(); ++i) {
    Object object = {};
    if (is_clique(reader, module, words[i])) {  // the object itself
      if (!reader.read_memory(here + i * sizeof(uintptr_t), &object, sizeof object)) continue;
    } else if (words[i] % alignof(uintptr_t) ||
               !reader.read_memory(words[i], &object, sizeof object) ||
               !is_clique(reader, module, object.functions)) {
      continue;
    }
    auto devices = devices_of(reader, object, first_device, key);
    if (!devices.empty() && std::find(found.begin(), found.end(), devices) == found.end())
      found.push_back(std::move(devices));
  }
  return found;
}

}  // namespace jaxmpi::mpi
