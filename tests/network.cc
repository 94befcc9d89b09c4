// A switch between hosts that are network namespaces: with a rate, a delay and a loss, in user space.
//
//     network DELAY_MS MBIT_PER_S LOSS NAMESPACE NAMESPACE...
//
// For kernels without netem. Each namespace gets a TUN device "cable"; host i is 10.77.0.i, from 1 on. A host sends and receives
// at the rate, both at once, as through a cable of its own. What has been sent arrives after the delay, or, with probability
// LOSS, not at all. A host's queue drops what it has no room for. Prints "ready" once the devices are there.
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <queue>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using std::chrono::nanoseconds;

constexpr int kMostBytes = 65536;    // of a packet
constexpr int kBatch = 32;           // packets that are read of one host before it is another's turn
constexpr double kRoomBytes = 4e6;   // of a queue, at least

struct Cable {
  int device;
  size_t queued = 0;  // bytes on their way from this host
  Time sends_until, receives_until;
};

struct Packet {
  Time due;
  uint64_t number;  // those that are due at once keep their order
  int from, to;
  std::vector<char> bytes;
  bool operator<(const Packet& other) const { return std::tie(other.due, other.number) < std::tie(due, number); }
};

int open_device(const std::string& space) {
  const int file = open(("/var/run/netns/" + space).c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0 || setns(file, CLONE_NEWNET) != 0) throw std::runtime_error("namespace " + space + " cannot be entered");
  close(file);
  const int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  ifreq request = {};
  std::strcpy(request.ifr_name, "cable");
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  if (device < 0 || ioctl(device, TUNSETIFF, &request) != 0) throw std::runtime_error("no TUN device: is /dev/net/tun there?");
  return device;
}

class Switch {
 public:
  Switch(double delay_ms, double mbit, double loss, const std::vector<std::string>& spaces)
      : delay_(static_cast<int64_t>(delay_ms * 1e6)), ns_per_byte_(8e3 / mbit), lost_(loss) {
    room_ = static_cast<size_t>(std::max(kRoomBytes, 2 * delay_ms * 1e6 / ns_per_byte_));
    for (const auto& space : spaces) cables_.push_back({open_device(space), 0, {}, {}});
  }

  void run() {
    std::vector<pollfd> devices;
    for (const Cable& cable : cables_) devices.push_back({cable.device, POLLIN, 0});
    for (;;) {
      timespec wait = {};
      if (!packets_.empty()) {
        const int64_t ns = std::max<int64_t>(0, nanoseconds(packets_.top().due - Clock::now()).count());
        wait = {ns / 1'000'000'000, ns % 1'000'000'000};
      }
      ppoll(devices.data(), devices.size(), packets_.empty() ? nullptr : &wait, nullptr);
      for (size_t i = 0; i < cables_.size(); ++i) {
        if (devices[i].revents) read_from(static_cast<int>(i));
      }
      deliver();
    }
  }

 private:
  void read_from(int from) {
    Cable& cable = cables_[from];
    for (int i = 0; i < kBatch; ++i) {
      const ssize_t n = read(cable.device, buffer_, sizeof buffer_);
      if (n < 0) return;
      if (n < 20 || buffer_[0] >> 4 != 4) continue;                  // IPv4 only
      const int to = static_cast<unsigned char>(buffer_[19]) - 1;  // the last byte of its destination
      if (to < 0 || to >= static_cast<int>(cables_.size()) || to == from || cable.queued + n > room_) continue;
      const nanoseconds takes(static_cast<int64_t>(n * ns_per_byte_));
      cable.sends_until = std::max(cable.sends_until, Clock::now()) + takes;
      if (lost_(random_)) continue;
      Cable& other = cables_[to];
      other.receives_until = std::max(cable.sends_until, other.receives_until + takes);
      cable.queued += n;
      packets_.push({other.receives_until + delay_, number_++, from, to, {buffer_, buffer_ + n}});
    }
  }

  void deliver() {
    while (!packets_.empty() && packets_.top().due <= Clock::now()) {
      const Packet& packet = packets_.top();
      if (write(cables_[packet.to].device, packet.bytes.data(), packet.bytes.size()) < 0 && errno == EAGAIN) return;
      cables_[packet.from].queued -= packet.bytes.size();
      packets_.pop();
    }
  }

  const nanoseconds delay_;
  const double ns_per_byte_;
  size_t room_;
  std::bernoulli_distribution lost_;
  std::minstd_rand random_{1};
  std::vector<Cable> cables_;
  std::priority_queue<Packet> packets_;
  uint64_t number_ = 0;
  char buffer_[kMostBytes];
};

}  // namespace

int main(int count, char** words) {
  if (count < 6) {
    std::fprintf(stderr, "usage: network DELAY_MS MBIT_PER_S LOSS NAMESPACE NAMESPACE...\n");
    return 2;
  }
  try {
    prctl(PR_SET_TIMERSLACK, 1);  // ns: a delay of 0.1 ms is one
    Switch all(std::atof(words[1]), std::atof(words[2]), std::atof(words[3]), {words + 4, words + count});
    std::puts("ready");
    std::fflush(stdout);
    all.run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "network: %s\n", error.what());
    return 1;
  }
}
