#include "mpi_abi.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <optional>
#include <sstream>

#include "backoff.h"
#include "clique.h"
#include "mpi_groups.h"
#include "mpi_waits.h"
#include "plain_rank.h"
#include "record.h"

namespace jaxmpi::mpi {
namespace {

using Number = uintptr_t;  // a handle of this library

constexpr Number kWorld = 1, kFirstType = 0x100, kFirstOp = 0x200;
constexpr int kFailed = 1;                     // any code but MPI_SUCCESS
constexpr int64_t kArrivalNs = 1'000'000'000;  // for what a rank has sent before its end
constexpr size_t kErrorBytes = 500;            // of XLA's buffer for an error
constexpr int kDevicesOfProcess = 1 << 11;  // XLA numbers those of process p from p times this on

constexpr Number number(Type type) { return kFirstType + static_cast<Number>(type); }
constexpr Number number(Op op) { return kFirstOp + static_cast<Number>(op); }
Type type_of(Number number) { return static_cast<Type>(number - kFirstType); }
Op op_of(Number number) { return static_cast<Op>(number - kFirstOp); }

template <class Enum, size_t count>
const char* name_of(const Named<Enum> (&table)[count], Enum value) {
  for (const Named<Enum>& named : table) {
    if (named.value == value) return named.name;
  }
  return "?";
}

thread_local std::string failure;  // the last one of this thread

Group& group_of(Number comm) {
  running();
  if (comm == kWorld) throw std::runtime_error("XLA communicates on MPI_COMM_WORLD");
  return *reinterpret_cast<Group*>(comm);
}

// Return the result of a function of MPI: 0, or a failure whose words MPI_Error_string has.
template <class Body>
int reported(Body body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    failure = std::string("jaxmpi: ") + error.what();
    return kFailed;
  }
}

uint64_t mix(uint64_t seed, uint64_t value) {
  seed ^= value + 0x9e3779b97f4a7c15 + (seed << 6) + (seed >> 2);
  return seed * 0xff51afd7ed558ccd;
}

// Return a count of XLA, which MPI has as an int; `unit` is what this collective counts.
int64_t checked(const char* collective, int count, const char* unit) {
  if (count < 0)
    throw std::runtime_error(std::string(collective) + " has 2^31 " + unit +
                             " or more of one array, and JAX's collectives over MPI count " + unit +
                             " in an int. Divide the array");
  return count;
}

// A message on record, where this rank has no monitor of jaxmpi.
class Recorded {
 public:
  // A collective of a group
  template <class Describe>
  Recorded(Group& group, uint64_t fingerprint, int64_t bytes, const Describe& describe) {
    PlainRecord* const record = plain_record();
    if (!record) return;
    fingerprint = mix(fingerprint, group.hash_of_members);
    record->name(static_cast<int64_t>(fingerprint), describe);
    waits_.emplace();
    entered_.emplace(*group.transport, static_cast<int64_t>(fingerprint), bytes);
    (group_ = &group)->is_inside = true;
  }
  // A message to or from one other rank
  template <class Describe>
  Recorded(int other, uint64_t fingerprint, int64_t bytes, const Describe& describe) {
    PlainRecord* const record = plain_record();
    if (!record) return;
    record->name(static_cast<int64_t>(fingerprint), describe);
    waits_.emplace();
    entered_.emplace(static_cast<int64_t>(fingerprint), bytes);
    running().expect(other_ = other);
  }
  ~Recorded() {
    if (group_) group_->is_inside = false;
    if (other_ >= 0) running().expect_no_more(other_);
  }
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;

 private:
  std::optional<record::Exposed> waits_;
  std::optional<record::Entered> entered_;
  Group* group_ = nullptr;
  int other_ = -1;
};

// Carry out a collective. The ranks compare what each is about to do.
void carry_out(Group& group, const char* name, const Operation& operation, const Array& array) {
  const auto what = [name, operation, array] {
    std::ostringstream text;
    text << name << " of " << array.columns << " " << name_of(kTypes, array.type);
    if (operation.kind == Kind::Allreduce || operation.kind == Kind::ReduceScatter)
      text << " (" << name_of(kOps, operation.op) << ")";
    return text.str();
  };
  const auto describe = [&group, what, array] {
    return what() + ", " + std::to_string(array.bytes()) + " bytes, with " + list(group.members);
  };
  const auto missing_ranks = [&group] {
    std::vector<int> ranks;
    for (int member : group.transport->missing_ranks()) ranks.push_back(group.members[member]);
    return ranks;
  };
  const auto missing = [missing_ranks] {
    const std::vector<int> ranks = missing_ranks();
    return ranks.empty() ? std::string() : "it waits for " + list(ranks);
  };
  const int offset =
      operation.dest < 0 ? 0 : (operation.dest - group.rank + group.size()) % group.size();
  uint64_t fingerprint =
      mix(static_cast<uint64_t>(operation.kind), static_cast<uint64_t>(array.type));
  fingerprint = mix(fingerprint, static_cast<uint64_t>(operation.op));
  fingerprint = mix(fingerprint, static_cast<uint64_t>(array.columns));
  fingerprint = mix(fingerprint, static_cast<uint64_t>(offset));
  // The wait begins with the turn: before, the transport's counters are those of the message of
  // another thread, which reports it itself.
  const std::lock_guard turn(group.mutex);
  // In a step of an all-to-all, the one to which this rank sends may be through with its part.
  std::vector<int> ranks = group.members;
  if (operation.kind == Kind::Permute) ranks = {group.members[operation.source]};
  const Wait wait(describe, missing, std::move(ranks));
  const Recorded recorded(group, fingerprint, array.bytes(),
                          [&what, &group] { return what() + ", with " + list(group.members); });
  std::vector<Array> arrays;
  if (array.columns) arrays.push_back(array);
  try {
    group.transport->run(operation, static_cast<int64_t>(fingerprint), std::move(arrays));
  } catch (const CollectiveMismatch&) {
    throw std::runtime_error("rank " + std::to_string(running().rank()) + " is in " + describe() +
                             ", and another of them in another collective. All ranks must run the "
                             "same programs in the same order");
  } catch (const RankLost& error) {
    note_lost(missing_ranks());
    throw std::runtime_error(std::string(error.what()) + ", while this rank was in " + describe());
  }
}

Array array_of(const char* collective, const void* in, void* out, int count, Type type,
               const char* unit = "elements") {
  return {type, static_cast<const char*>(in), static_cast<char*>(out),
          checked(collective, count, unit)};
}

// A group of one rank copies.
bool alone(const Group& group, const Array& array) {
  if (group.size() > 1) return false;
  if (array.in != array.out) std::memcpy(array.out, array.in, static_cast<size_t>(array.bytes()));
  return true;
}

// Return the processes of devices, if each has one device; else, nothing.
std::vector<int> processes_of(const std::vector<int32_t>& devices) {
  std::vector<int> processes;
  for (int32_t device : devices) {
    if (device % kDevicesOfProcess != 0) return {};
    processes.push_back(static_cast<int>(device / kDevicesOfProcess));
  }
  return processes;
}

// Return the ranks of the communicator that XLA is about to make; end the job where they are not
// to be found.
std::vector<int> members_of(int color, int key, const void* caller) {
  Job& job = running();
  const std::string advice = " Set JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo.";
  const auto found = find_cliques(color, key, caller);
  if (found.empty())
    die("does not find which devices communicate in this jaxlib, which jaxmpi does not know." +
        advice);
  // This process asks, so its own device is at its place in the clique.
  const auto process_at = [&](const std::vector<int32_t>& devices) {
    return static_cast<int>(devices[static_cast<size_t>(key)] / kDevicesOfProcess);
  };
  std::vector<std::vector<int32_t>> own;
  for (const auto& devices : found) {
    if (process_at(devices) == job.rank()) own.push_back(devices);
  }
  if (own.empty())
    die("is process " + std::to_string(process_at(found.front())) +
        " for JAX, and the two must be the same number. Call jax.distributed.initialize with "
        "process_id=rank, or without arguments.");
  const auto* devices = choose_clique(own, [&](const std::vector<int32_t>& devices) {
    const std::vector<int> processes = processes_of(devices);
    return !processes.empty() && job.has_users(processes);
  });
  if (!devices)
    die("cannot tell which of " + std::to_string(own.size()) + " sets of devices communicate: " +
        list(processes_of(own[0])) + ", or " + list(processes_of(own[1])) + "." + advice);
  const std::vector<int> members = processes_of(*devices);
  if (members.empty() || *std::max_element(members.begin(), members.end()) >= job.size())
    die("has more than one CPU device, and JAX's collectives over MPI take one a process. Leave "
        "out jax_num_cpu_devices and --xla_force_host_platform_device_count: each rank is a "
        "device.");
  return members;
}

// A message from rank to rank.
struct Message {
  const Group* group;
  int place;  // in the group, of the rank at the other end
  bool sends;
  int64_t bytes;
  alignas(void*) char request[sizeof(void*)];
};

template <class Start>
Number start(Number comm, bool sends, int place, int count, Start start) {
  Group& group = group_of(comm);
  auto message = std::make_unique<Message>(
      Message{&group, place, sends, checked("a permute", count, "bytes"), {}});
  start(running().library(), group.point_to_point, message->request);
  return reinterpret_cast<Number>(message.release());
}

void finish(Number& request) {
  if (!request) return;
  const std::unique_ptr<Message> message(reinterpret_cast<Message*>(std::exchange(request, 0)));
  const Library& library = running().library();
  const int other = message->group->members.at(static_cast<size_t>(message->place));
  const std::string permute = std::string("a permute ") + (message->sends ? "to" : "from") +
                              " rank " + std::to_string(other);
  const auto describe = [&] {
    return permute + ", of " + std::to_string(message->bytes) + " bytes";
  };
  const Wait wait(describe, [] { return std::string(); }, {other});
  const uint64_t direction = mix(message->sends ? 1 : 2, static_cast<uint64_t>(other));
  const Recorded recorded(other, mix(direction, static_cast<uint64_t>(message->bytes)),
                          message->bytes, [&permute] { return permute; });
  Backoff backoff(running().crowded(), Backoff::Awaited::kMessages);
  int64_t ended_ns = 0;  // when the other rank was seen to have ended
  for (;;) {
    int done = 0;
    alignas(int64_t) char status[kStatusBytes];
    check(library, library.test(message->request, &done, status), "MPI_Test");
    if (done) return;
    if (!backoff.pause()) continue;
    const Transport* const transport = message->group->transport.get();
    if (!transport || !transport->has_ended(message->place)) continue;
    if (!ended_ns) ended_ns = now();
    if (now() - ended_ns < kArrivalNs) continue;
    note_lost({other});
    throw std::runtime_error("rank " + std::to_string(other) +
                             " has ended, while this rank was in " + describe());
  }
}

}  // namespace

void refuse(const char* function) {
  die("JAX has called MPI_" + std::string(function) +
      ", which jaxmpi's library for JAX's collectives does not have. Set "
      "JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo.");
}

}  // namespace jaxmpi::mpi

using namespace jaxmpi;
using namespace jaxmpi::mpi;

extern "C" {

// MPItrampoline checks these before it asks for the rest.
int mpiwrapper_version_major = 2, mpiwrapper_version_minor = 11, mpiwrapper_version_patch = 0;
int mpiabi_version_major = 2, mpiabi_version_minor = 10, mpiabi_version_patch = 0;
void mpiwrapper_export_fortran_constants_() {}

Constant MPIABI_COMM_WORLD = {kWorld, 0};
Constant MPIABI_THREAD_FUNNELED = {1, 0};
Constant MPIABI_THREAD_SERIALIZED = {2, 0};
Constant MPIABI_THREAD_MULTIPLE = {3, 0};
Constant MPIABI_BYTE = {number(Type::U8), 0};
Constant MPIABI_INT8_T = {number(Type::S8), 0};
Constant MPIABI_INT16_T = {number(Type::S16), 0};
Constant MPIABI_INT32_T = {number(Type::S32), 0};
Constant MPIABI_INT64_T = {number(Type::S64), 0};
Constant MPIABI_UINT8_T = {number(Type::U8), 0};
Constant MPIABI_UINT16_T = {number(Type::U16), 0};
Constant MPIABI_UINT32_T = {number(Type::U32), 0};
Constant MPIABI_UINT64_T = {number(Type::U64), 0};
Constant MPIABI_FLOAT = {number(Type::F32), 0};
Constant MPIABI_DOUBLE = {number(Type::F64), 0};
Constant MPIABI_C_COMPLEX = {number(Type::C64), 0};
Constant MPIABI_C_FLOAT_COMPLEX = {number(Type::C64), 0};
Constant MPIABI_C_DOUBLE_COMPLEX = {number(Type::C128), 0};
Constant MPIABI_SUM = {number(Op::Sum), 0};
Constant MPIABI_PROD = {number(Op::Prod), 0};
Constant MPIABI_MIN = {number(Op::Min), 0};
Constant MPIABI_MAX = {number(Op::Max), 0};

// The monitor of a rank calls it, while a program of jaxmpi is under way on backend xla.
void jaxmpi_leave_end_to_monitor(int is_left) { leave_end_to_monitor(is_left != 0); }

// jaxmpi.init begins: a monitor watches this rank from now on, and writes its records.
void jaxmpi_leave_rank_to_monitor() { leave_rank_to_monitor(); }

// The monitor of a rank calls it when the rank has come to its end, and waits for the other ranks.
void jaxmpi_begin_to_leave() { begin_to_leave(); }

int MPIABI_Init_thread(int*, char***, int, int* provided) {
  begin();
  *provided = kThreadMultiple;
  return 0;
}

int MPIABI_Initialized(int* flag) {
  *flag = has_begun();
  return 0;
}

int MPIABI_Finalized(int* flag) {
  *flag = 0;
  return 0;
}

// XLA calls it while programs may still run. The end of the process ends MPI, or whoever has
// started it.
int MPIABI_Finalize() { return 0; }

// XLA asks before it makes a communicator, because it knows no MPI that any thread may call.
int MPIABI_Is_thread_main(int* flag) {
  *flag = 1;
  return 0;
}

int MPIABI_Comm_rank(Number comm, int* rank) {
  return reported([&] { *rank = comm == kWorld ? running().rank() : group_of(comm).rank; });
}

int MPIABI_Comm_size(Number comm, int* size) {
  return reported([&] { *size = comm == kWorld ? running().size() : group_of(comm).size(); });
}

int MPIABI_Comm_split(Number, int color, int key, Number* comm) {
  try {
    const std::vector<int> members = members_of(color, key, __builtin_return_address(0));
    const Wait wait([&] { return "the making of a communicator of " + list(members); },
                    [] { return std::string(); }, members);
    Group& group = running().group(members);
    ++group.users;
    *comm = reinterpret_cast<Number>(&group);
  } catch (const std::exception& error) {
    die(std::string("cannot make a communicator: ") + error.what());
  }
  return 0;
}

// A group stays: XLA makes a communicator of the same ranks again for a new client.
int MPIABI_Comm_free(Number* comm) {
  return reported([&] { --group_of(*comm).users; });
}

int MPIABI_Allreduce(const void* in, void* out, int count, Number type, Number op, Number comm) {
  return reported([&] {
    Group& group = group_of(comm);
    const Array array = array_of("an all-reduce", in, out, count, type_of(type));
    if (alone(group, array)) return;
    carry_out(group, "an all-reduce", {Kind::Allreduce, op_of(op), 1, -1, -1}, array);
  });
}

int MPIABI_Allgather(const void* in, int count, Number type, void* out, int, Number, Number comm) {
  return reported([&] {
    Group& group = group_of(comm);
    const Array array = array_of("an all-gather", in, out, count, type_of(type));
    if (alone(group, array)) return;
    carry_out(group, "an all-gather", {Kind::Allgather, Op::Sum, 1, -1, -1}, array);
  });
}

// XLA gives all ranks the same count.
int MPIABI_Reduce_scatter(const void* in, void* out, const int* counts, Number type, Number op,
                          Number comm) {
  return reported([&] {
    Group& group = group_of(comm);
    const Array array = array_of("a reduce-scatter", in, out, counts[0], type_of(type));
    if (alone(group, array)) return;
    carry_out(group, "a reduce-scatter", {Kind::ReduceScatter, op_of(op), 1, -1, -1}, array);
  });
}

// A step of an all-to-all, in which all ranks send to one at the same distance.
int MPIABI_Sendrecv(const void* in, int count, Number type, int dest, int, void* out, int, Number,
                    int source, int, Number comm, void*) {
  return reported([&] {
    Group& group = group_of(comm);
    const Array array = array_of("an all-to-all", in, out, count, type_of(type), "bytes");
    if (alone(group, array)) return;
    carry_out(group, "an all-to-all", {Kind::Permute, Op::Sum, 1, source, dest}, array);
  });
}

// A permute, in which some ranks may neither send nor receive.
int MPIABI_Isend(const void* from, int count, Number, int dest, int tag, Number comm,
                 Number* request) {
  return reported([&] {
    *request = start(comm, true, dest, count, [&](const Library& mpi, Handle messages, void* to) {
      check(mpi, mpi.isend(from, count, mpi.byte, dest, tag, messages, to), "MPI_Isend");
    });
  });
}

int MPIABI_Irecv(void* into, int count, Number, int source, int tag, Number comm, Number* request) {
  return reported([&] {
    *request =
        start(comm, false, source, count, [&](const Library& mpi, Handle messages, void* to) {
          check(mpi, mpi.irecv(into, count, mpi.byte, source, tag, messages, to), "MPI_Irecv");
        });
  });
}

int MPIABI_Wait(Number* request, void*) {
  return reported([&] { finish(*request); });
}

int MPIABI_Waitall(int count, Number* requests, void*) {
  return reported([&] {
    for (int i = 0; i < count; ++i) finish(requests[i]);
  });
}

int MPIABI_Abort(Number, int code) { abort_job(code); }

int MPIABI_Error_string(int, char* text, int* length) {
  *length = std::snprintf(text, kErrorBytes, "%s", failure.c_str());
  *length = std::min<int>(*length, kErrorBytes - 1);
  return 0;
}

}  // extern "C"
