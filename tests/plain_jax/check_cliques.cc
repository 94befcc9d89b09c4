// Looks for cliques as XLA's calls leave them on the stack, and prints the ones
// that are found.
//
//     check_cliques one | leftover | unknown | pipe | unreadable
#include <sys/resource.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "clique.h"

namespace xla::cpu {

// The layout and the name of XLA's class.
class CpuCliqueKey {
public:
  explicit CpuCliqueKey(std::vector<int32_t> devices)
      : devices_(std::move(devices)) {}
  virtual ~CpuCliqueKey();

private:
  std::vector<int32_t> devices_;
};

CpuCliqueKey::~CpuCliqueKey() = default;

} // namespace xla::cpu

namespace {

using Devices = std::vector<int32_t>;
using xla::cpu::CpuCliqueKey;

bool forbidden = false; // whether process_vm_readv is
bool no_files = false;  // whether no file can be opened

void print(const char *title, const Devices &devices) {
  std::printf("%s", title);
  for (int32_t device : devices)
    std::printf(" %d", device);
  std::printf("\n");
}

// The call of MPI_Comm_split for rank 0, in a frame with slots that an earlier
// call has left.
__attribute__((noinline)) void split(const CpuCliqueKey &key,
                                     const CpuCliqueKey *leftover,
                                     const std::vector<Devices> &in_use) {
  const void *volatile slots[16];
  for (auto &slot : slots)
    slot = leftover;
  const auto found =
      jaxmpi::mpi::find_cliques(0, 0, reinterpret_cast<const void *>(&split));
  for (const Devices &devices : found)
    print("found", devices);
  const Devices *chosen =
      jaxmpi::mpi::choose_clique(found, [&](const Devices &devices) {
        for (const Devices &one : in_use) {
          if (one == devices)
            return true;
        }
        return false;
      });
  if (chosen)
    print("chosen", *chosen);
  else
    std::printf("not chosen\n");
  slots[0] = &key; // XLA still needs its argument after the call, too
}

} // namespace

// In the place of the C library's.
extern "C" ssize_t process_vm_readv(pid_t, const iovec *local, unsigned long,
                                    const iovec *remote, unsigned long,
                                    unsigned long) {
  if (no_files) {
    const rlimit none = {0, 0};
    setrlimit(RLIMIT_NOFILE, &none);
  }
  if (forbidden) {
    errno = EPERM;
    return -1;
  }
  // What is read here is memory of the stack, the heap and the program, but for
  // integers.
  const auto address = reinterpret_cast<uintptr_t>(remote->iov_base);
  FILE *maps = std::fopen("/proc/self/maps", "r");
  char line[512];
  ssize_t done = -1;
  while (done < 0 && std::fgets(line, sizeof line, maps)) {
    unsigned long begin = 0, end = 0;
    char mode = 0;
    if (std::sscanf(line, "%lx-%lx %c", &begin, &end, &mode) != 3 ||
        mode != 'r')
      continue;
    if (address < begin || address + remote->iov_len > end)
      continue;
    std::memcpy(local->iov_base, remote->iov_base, remote->iov_len);
    done = static_cast<ssize_t>(remote->iov_len);
  }
  std::fclose(maps);
  errno = EFAULT;
  return done;
}

int main(int, char **arguments) {
  const std::string what = arguments[1];
  forbidden = what == "pipe" || what == "unreadable";
  no_files = what == "unreadable";
  // On the heap, as XLA's: main's frame has no key.
  const auto key = [](int32_t one, int32_t two) {
    return new CpuCliqueKey({one, two});
  };
  try {
    if (what == "one")
      split(*key(0, 2), key(1, 3), {}); // color 1: it is another communicator's
    else if (what == "unknown")
      split(*key(0, 2), key(0, 1), {});
    else
      split(*key(0, 2), key(0, 1), {{0, 1}});
  } catch (const std::exception &error) {
    std::printf("%s\n", error.what());
  }
  return 0;
}
