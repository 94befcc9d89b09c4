#include "mpi_groups.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "clock.h"

namespace jaxmpi::mpi {
namespace {

constexpr const char* kSharedMemory = "/dev/shm";

// The sizes of messages. They are fixed, as the network is not measured here: a measurement is
// collective over all ranks, and a group is made by its members only. All ranks of a group, and all
// runs of a job, must use the same ones, because they decide in which order sums are formed.
//
// Within a node: 4 chunks of 256 KiB for each thread of a rank, about as much as a core's L2 cache
// holds.
constexpr int64_t kNodeChunkBytes = 1 << 18;
constexpr int kNodeChunks = 4;
// Between nodes: 16 chunks of at most 512 KiB are in transit or being reduced, enough to keep a
// network busy whose rate times latency is some megabytes.
constexpr int64_t kMostChunkBytes = 1 << 19;
constexpr int kChunks = 16;
// Of a rank, which share a large message within a node: half of its cores, and at most 4.
constexpr int kMostThreads = 4;
// Up to 32 KiB, a message is sent together with its fingerprint. Up to 8 nodes, each sends to each;
// above, there are ceil(log2(nodes)) rounds.
constexpr Tuning kTuning = {1 << 15, 8};

constexpr int kTags = 16000;  // MPI allows at least 32767

uint64_t hash(const void* data, size_t bytes, uint64_t seed = 0xcbf29ce484222325) {
  for (size_t i = 0; i < bytes; ++i)
    seed = (seed ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3;
  return seed;
}

// What a rank tells the others of the place where it runs.
struct NodeInfo {
  uint64_t node;  // equal on ranks that can share memory
  cpu_set_t cores;
  double quota;  // how many processors' time this process may use: a container's limit
  Member member;
  uint64_t token;  // of rank 0: JobPlace::token
};

// As `quota` of jaxmpi/_job/process/processor.py.
double processor_quota() {
  double limit, period;
  FILE* file = std::fopen("/sys/fs/cgroup/cpu.max", "r");
  if (!file) return HUGE_VAL;
  const int found = std::fscanf(file, "%lf %lf", &limit, &period);  // "max" is no number
  std::fclose(file);
  return found == 2 && period > 0 ? limit / period : HUGE_VAL;
}

NodeInfo node_info(int rank) {
  utsname host = {};
  uname(&host);
  uint64_t node = hash(host.nodename, std::strlen(host.nodename));
  char boot[64] = {};
  if (FILE* file = std::fopen("/proc/sys/kernel/random/boot_id", "r")) {
    const size_t bytes = std::fread(boot, 1, sizeof boot, file);
    std::fclose(file);
    node = hash(boot, bytes, node);
  }
  struct stat folder = {};  // another one in each container
  if (stat(kSharedMemory, &folder) == 0) node = hash(&folder.st_dev, sizeof folder.st_dev, node);
  const char* ranks = std::getenv("JAXMPI_NODE_RANKS");
  if (const int each = ranks ? std::atoi(ranks) : 0; each > 0) {
    const int number = rank / each;
    node = hash(&number, sizeof number, node);
  }
  std::random_device random;
  NodeInfo info = {
      node, {}, processor_quota(), {getpid(), {}}, uint64_t{random()} << 32 | random()};
  std::snprintf(info.member.host, sizeof info.member.host, "%s", host.nodename);
  sched_getaffinity(0, sizeof info.cores, &info.cores);
  return info;
}

// Sent between the ranks of a node: the shared file's path, or the error that prevented it.
struct Memory {
  char path[64] = {};
  char failure[192] = {};
};

std::string fail(const char* what) { return std::string(what) + ": " + std::strerror(errno); }

// Open a file of shared memory, and map it; return why not, or "".
std::string map(const char* path, bool make, int64_t bytes, int& file, char*& memory) {
  file = ::open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC | (make ? O_CREAT | O_EXCL : 0), 0600);
  if (file < 0) return fail(path);
  // An error now, rather than a bus error later.
  while (make && (errno = posix_fallocate(file, 0, bytes)) != 0) {
    if (errno != EINTR) return fail(path);  // older kernels stop at any signal
  }
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED) return fail("mmap");
  memory = static_cast<char*>(mapped);
  return "";
}

}  // namespace

Job::Job() : library_(open_library()) {
  int running = 0, over = 0, level = 0;
  check(library_, library_.finalized(&over), "MPI_Finalized");
  if (over) throw std::runtime_error("MPI has ended in this process already. Start a new one.");
  check(library_, library_.initialized(&running), "MPI_Initialized");
  if (!running) {
    check(library_, library_.init_thread(nullptr, nullptr, kThreadMultiple, &level),
          "MPI_Init_thread");
    started_ = true;
  }
  check(library_, library_.query_thread(&level), "MPI_Query_thread");
  if (level < kThreadMultiple) {
    throw std::runtime_error(
        "MPI runs without MPI_THREAD_MULTIPLE, and XLA communicates on several threads. Start it "
        "with this level, or leave it to jaxmpi to start MPI.");
  }
  check(library_, library_.comm_rank(library_.world, &rank_), "MPI_Comm_rank");
  check(library_, library_.comm_size(library_.world, &size_), "MPI_Comm_size");
}

void Job::join() {
  check(library_, library_.comm_dup(library_.world, &world_), "MPI_Comm_dup");
  const NodeInfo mine = node_info(rank_);
  std::vector<NodeInfo> all(static_cast<size_t>(size_));
  check(library_,
        library_.allgather(&mine, sizeof mine, library_.byte, all.data(), sizeof mine,
                           library_.byte, world_),
        "MPI_Allgather");
  departures_.emplace(library_, world_, rank_, size_);
  place_ = {rank_, {}, all[0].token, now()};
  for (const NodeInfo& info : all) place_.members.push_back(info.member);
  // Nodes have numbers in the order of their first ranks. All ranks compute the same from the same
  // table: how many threads a rank has, and whether any node has more ranks than cores.
  std::vector<uint64_t> names;
  std::vector<cpu_set_t> cores;
  std::vector<double> quotas;  // the smallest of a rank
  std::vector<int> ranks;
  for (const NodeInfo& info : all) {
    const size_t node = std::find(names.begin(), names.end(), info.node) - names.begin();
    if (node == names.size()) {
      names.push_back(info.node);
      cores.push_back(info.cores);
      quotas.push_back(info.quota);
      ranks.push_back(0);
    }
    CPU_OR(&cores[node], &cores[node], &info.cores);
    quotas[node] = std::min(quotas[node], info.quota);
    ++ranks[node];
    nodes_.push_back(static_cast<int>(node));
  }
  threads_ = kMostThreads;
  for (size_t node = 0; node < names.size(); ++node) {
    const double processors = std::min<double>(CPU_COUNT(&cores[node]), quotas[node]);
    const int each = static_cast<int>(processors / ranks[node]);
    if (each < 1) crowded_ = true;
    threads_ = std::max(1, std::min(threads_, each / 2));
    largest_node_ = std::max<int64_t>(largest_node_, ranks[node]);
  }
}

Group& Job::group(const std::vector<int>& members) {
  Slot* slot;
  {
    const std::lock_guard lock(mutex_);
    slot = &groups_[members];
  }
  // Two threads may ask for one at a time, and on the other ranks one thread. It is made once.
  std::call_once(slot->made, [&] {
    auto group = make(members);
    const std::lock_guard lock(mutex_);
    slot->group = std::move(group);
  });
  return *slot->group;
}

bool Job::has_users(const std::vector<int>& members) {
  const std::lock_guard lock(mutex_);
  const auto found = groups_.find(members);
  return found != groups_.end() && found->second.group && found->second.group->users > 0;
}

void Job::expect(int rank) {
  const std::lock_guard lock(mutex_);
  expected_.insert(rank);
}

void Job::expect_no_more(int rank) {
  const std::lock_guard lock(mutex_);
  expected_.erase(expected_.find(rank));
}

std::optional<std::vector<int>> Job::missing_ranks() {
  const std::lock_guard lock(mutex_);
  std::set<int> missing(expected_.begin(), expected_.end());
  bool all_known = true;
  for (const auto& [members, slot] : groups_) {
    if (!slot.group || !slot.group->is_inside) continue;
    const std::vector<int> here = slot.group->transport->missing_ranks();  // on this node
    if (here.empty() && slot.group->spans_nodes) all_known = false;
    for (const int member : here) missing.insert(members[static_cast<size_t>(member)]);
  }
  if (missing.empty() && !all_known) return std::nullopt;
  return std::vector<int>(missing.begin(), missing.end());
}

void Job::leave_node() {
  const std::lock_guard lock(mutex_);
  for (const auto& [members, slot] : groups_) {
    if (slot.group && slot.group->transport) slot.group->transport->leave();
  }
}

bool Job::leave() {
  if (!leaves_) {
    leaves_ = true;
    leave_node();
    departures_->tell();
  }
  return departures_->have_told();
}

bool Job::has_left(int rank) { return departures_->has_left(rank); }

// Return a communicator of some ranks. Only these call it.
Handle Job::split(const std::vector<int>& members, int tag) {
  Handle all = 0, some = 0, comm = 0;
  check(library_, library_.comm_group(world_, &all), "MPI_Comm_group");
  check(library_, library_.group_incl(all, static_cast<int>(members.size()), members.data(), &some),
        "MPI_Group_incl");
  check(library_, library_.comm_create_group(world_, some, tag, &comm), "MPI_Comm_create_group");
  library_.group_free(&some);
  library_.group_free(&all);
  return comm;
}

std::unique_ptr<Group> Job::make(const std::vector<int>& members) {
  auto group = std::make_unique<Group>();
  group->members = members;
  group->rank =
      static_cast<int>(std::find(members.begin(), members.end(), rank_) - members.begin());
  if (group->size() == 1) return group;
  group->hash_of_members = hash(members.data(), members.size() * sizeof(int));
  const int tag = static_cast<int>(group->hash_of_members % kTags);
  const Handle comm = split(members, tag);
  check(library_, library_.comm_dup(comm, &group->point_to_point), "MPI_Comm_dup");
  group->transport = connect(*group, comm);
  for (const int member : members) group->spans_nodes |= nodes_[member] != nodes_[rank_];
  return group;
}

// Map the memory that the members of this node share, and connect the other nodes. The
// communicator belongs to the transport from now on.
std::unique_ptr<Transport> Job::connect(const Group& group, Handle comm) {
  const int here = nodes_[rank_], size = group.size();
  // The members by node, and the ranks of each node.
  std::vector<int> order, ranks, numbers;
  std::vector<int> names;  // local ranks on this node, for errors
  int node = 0, local = 0;
  for (int number = 0; number <= *std::max_element(nodes_.begin(), nodes_.end()); ++number) {
    int count = 0;
    for (int i = 0; i < size; ++i) {
      if (nodes_[group.members[i]] != number) continue;
      if (i == group.rank) {
        node = static_cast<int>(ranks.size());
        local = count;
      }
      if (number == here) {
        const int member = group.members[i];
        names.push_back(
            static_cast<int>(std::count(nodes_.begin(), nodes_.begin() + member, here)));
      }
      order.push_back(i);
      ++count;
    }
    if (count) ranks.push_back(count);
  }
  const bool several = ranks.size() > 1;
  const int threads = several ? 1 : threads_;
  int64_t slot_bytes = kNodeChunkBytes;
  int slots = kNodeChunks;
  if (several) {
    const int64_t half = std::max<int64_t>(1, static_cast<int64_t>(ranks.size()) / 2);
    slot_bytes = std::min(kMostChunkBytes, kPieceBytes * largest_node_ * half);
    slots = kChunks;
  }
  const Node::Layout layout = {local, ranks[node], slot_bytes, slots, crowded_, names};
  const int64_t bytes = threads * layout.bytes();

  // The first rank of each node makes a file, and all learn its name; then the others map it.
  Memory mine;
  std::vector<Memory> all(static_cast<size_t>(size));
  const auto exchange = [&] {
    check(library_,
          library_.allgather(&mine, sizeof mine, library_.byte, all.data(), sizeof mine,
                             library_.byte, comm),
          "MPI_Allgather");
  };
  int file = -1;
  char* memory = nullptr;
  const auto map_here = [&](const char* path, bool make) {
    const std::string failure = map(path, make, bytes, file, memory);
    std::snprintf(mine.failure, sizeof mine.failure, "%s", failure.c_str());
  };
  if (local == 0) {
    std::random_device random;
    std::snprintf(mine.path, sizeof mine.path, "%s/jaxmpi-%08x%08x%08x%08x", kSharedMemory,
                  random(), random(), random(), random());
    map_here(mine.path, true);
  }
  exchange();
  int first = 0;  // this node's first rank among the members
  for (int number = 0; number < node; ++number) first += ranks[number];
  const Memory& leader = all[order[first]];
  if (local != 0 && !leader.failure[0]) map_here(leader.path, false);
  exchange();
  if (local == 0 && file >= 0) unlink(mine.path);
  for (int i = 0; i < size; ++i) {
    if (!all[i].failure[0]) continue;
    throw std::runtime_error("rank " + std::to_string(group.members[i]) + " cannot share " +
                             std::to_string(bytes >> 20) + " MiB of memory (" + all[i].failure +
                             "). Make room in " + kSharedMemory + ".");
  }
  std::vector<std::unique_ptr<Node>> nodes;
  for (int i = 0; i < threads; ++i)
    nodes.push_back(std::make_unique<Node>(layout, memory + i * layout.bytes(), file));
  auto transport = std::make_unique<Transport>(
      Topology(group.rank, std::move(order), std::move(ranks), node), std::move(nodes));
  if (several) {
    transport->connect(
        std::make_unique<Network>(library_.path,
                                  Network::Handles{comm, library_.byte, library_.request_bytes}),
        kTuning);
  }
  // Each has locked the byte that shows that it lives; nobody may look for it before.
  exchange();
  return transport;
}

void Job::abort(int code) const {
  library_.abort(library_.world, code);
  std::_Exit(code);
}

}  // namespace jaxmpi::mpi
