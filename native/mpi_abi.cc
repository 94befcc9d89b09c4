#include "mpi_abi.h"

#include <dlfcn.h>
#include <signal.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <thread>

#include "backoff.h"
#include "clique.h"
#include "mpi_groups.h"
#include "mpi_waits.h"
#include "plain_record.h"
#include "record.h"

namespace jaxmpi::mpi {
namespace {

using Number = uintptr_t;  // a handle of this library

constexpr Number kWorld = 1, kFirstType = 0x100, kFirstOp = 0x200;
constexpr int kFailed = 1;                                   // any code but MPI_SUCCESS
constexpr auto kLauncherTime = std::chrono::seconds(5);      // for the launcher to end the job
constexpr auto kRelayTime = std::chrono::milliseconds(100);  // for it to pass on our last lines
constexpr size_t kMostNamed = 16;                            // ranks in a sentence
constexpr int64_t kIdleNs = 2'000'000'000;                   // before a rank at its end has left
constexpr size_t kErrorBytes = 500;                          // of XLA's buffer for an error
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

// From MPI_Init on. Never destroyed: a program may still run when Python ends.
std::atomic<Job*> job = nullptr;
std::once_flag began;
std::atomic<bool> joined = false;  // whether the ranks know each other
pid_t process = 0;                 // that has called MPI_Init
std::atomic<bool> lost = false;    // whether another rank has ended in a collective
thread_local std::string failure;  // the last one of this thread
// Of a rank that has no monitor. Never destroyed.
std::atomic<PlainRecord*> plain_record = nullptr;
std::atomic<bool> asked_for_record = false;  // by SIGUSR1
std::atomic<bool> leaving = false;           // Python's end has begun

// Return this rank in digits, by the launcher's variables before MPI has started, or "".
std::string digits_of_rank() {
  if (const Job* known = job) return std::to_string(known->rank());
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"}) {
    if (const char* rank = std::getenv(name)) return rank;
  }
  return "";
}

std::string name_of_rank() {
  const std::string digits = digits_of_rank();
  return digits.empty() ? "a rank" : "rank " + digits;
}

void write_to_stderr(const std::string& line) {
  std::fwrite(line.data(), 1, line.size(), stderr);
  std::fflush(stderr);
}

void say(const std::string& text) {
  write_to_stderr("jaxmpi: " + name_of_rank() + " " + text + "\n");
}

std::string not_written(const std::exception& error) {
  return std::string("Its last collectives cannot be written (") + error.what() +
         "): set JAXMPI_FLIGHT_DIR to another folder.";
}

// Write the flight record; return a sentence about it.
std::string dumped(PlainRecord& record, const std::string& why) {
  try {
    return "Its last collectives are in " + record.dump(why);
  } catch (const std::exception& error) {
    return not_written(error);
  }
}

// Write it at the end of the process where the user has named a folder, and say why not.
void dump_at_end(const std::string& why) {
  PlainRecord* const record = plain_record;
  if (!record || !record->has_named_folder() || getpid() != process) return;
  try {
    record->dump(why);
  } catch (const std::exception& error) {
    say("ends. " + not_written(error));
  }
}

// Tell `jaxmpi run` which rank ends the job, in a line that it does not pass on: what MPI's
// launcher says about it may be lost (Open MPI 4). _job/process/failure.py reads the line.
void tell_launcher(int code) {
  const std::string rank = digits_of_rank();
  utsname system = {};
  if (rank.empty() || !std::getenv("JAXMPI_RUN_DIR") || uname(&system) != 0) return;
  if (lost) return;  // this rank fails because another one has
  std::ostringstream line;
  line << "jaxmpi-failure: [{\"rank\": " << rank << ", \"pid\": " << getpid() << ", \"host\": \""
       << system.nodename << "\", \"cause\": \"abort\", \"code\": " << code << "}]\n";
  write_to_stderr(line.str());
}

[[noreturn]] void abort_job(int code, const std::string& why = "") {
  if (process && getpid() != process) std::_Exit(code);  // a forked child is no rank
  dump_at_end(why.empty() ? "code " + std::to_string(code) : why);
  tell_launcher(code);
  std::this_thread::sleep_for(kRelayTime);
  if (const Job* known = job) known->abort(code);
  std::_Exit(code);  // this rank has no communicator yet; the launcher ends the other ranks
}

// XLA ignores the codes of some functions. What fails there ends the job.
[[noreturn]] void die(const std::string& text) {
  say(text);
  abort_job(kFailed, text);
}

std::string list(const std::vector<int>& ranks) {
  std::ostringstream text;
  if (ranks.size() > kMostNamed) text << ranks.size() << " ";
  text << (ranks.size() == 1 ? "rank " : "ranks ");
  for (size_t i = 0; i < std::min(ranks.size(), kMostNamed); ++i)
    text << (i ? ", " : "") << ranks[i];
  if (ranks.size() > kMostNamed) text << ", ...";
  return text.str();
}

Job& running() {
  Job* const known = job;
  if (!known) throw std::runtime_error("MPI_Init has not been called");
  if (getpid() != process)
    throw std::runtime_error("a forked child of a rank cannot communicate: use spawn");
  return *known;
}

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

int64_t checked(int64_t count) {
  if (count < 0)
    throw std::runtime_error(
        "an array has 2^31 elements or more, and MPI counts them in an int. Divide it");
  return count;
}

// A message on record, where this rank has no monitor of jaxmpi.
class Recorded {
 public:
  // Of all members of a group
  template <class Describe>
  Recorded(Group& group, uint64_t fingerprint, int64_t bytes, const Describe& describe) {
    PlainRecord* const record = plain_record;
    if (!record) return;
    fingerprint = mix(fingerprint, group.hash_of_members);
    name(*record, fingerprint, describe);
    waits_.emplace();
    entered_.emplace(*group.transport, static_cast<int64_t>(fingerprint), bytes);
    (group_ = &group)->is_inside = true;
  }
  // To or from one other rank
  template <class Describe>
  Recorded(int other, uint64_t fingerprint, int64_t bytes, const Describe& describe) {
    PlainRecord* const record = plain_record;
    if (!record) return;
    name(*record, fingerprint, describe);
    waits_.emplace();
    entered_.emplace(static_cast<int64_t>(fingerprint), bytes);
    const std::lock_guard lock(peers_mutex());
    peer_ = peers().insert(other);
  }
  ~Recorded() {
    if (group_) group_->is_inside = false;
    if (!peer_) return;
    const std::lock_guard lock(peers_mutex());
    peers().erase(*peer_);
  }

  // Return the ranks that this one waits for; nothing where that is not known.
  static std::optional<std::vector<int>> waits_for() {
    std::optional<std::vector<int>> ranks = running().missing_ranks();
    const std::lock_guard lock(peers_mutex());
    if (!peers().empty() && !ranks) ranks.emplace();
    if (ranks) ranks->insert(ranks->end(), peers().begin(), peers().end());
    return ranks;
  }

 private:
  template <class Describe>
  static void name(PlainRecord& record, uint64_t fingerprint, const Describe& describe) {
    record.name(static_cast<int64_t>(fingerprint), describe);
  }

  // The other ends of the messages between two ranks, of all threads. Never destroyed.
  static std::multiset<int>& peers() {
    static auto& all = *new std::multiset<int>;
    return all;
  }
  static std::mutex& peers_mutex() {
    static auto& mutex = *new std::mutex;
    return mutex;
  }

  std::optional<record::Exposed> waits_;
  std::optional<record::Entered> entered_;
  Group* group_ = nullptr;
  std::optional<std::multiset<int>::iterator> peer_;
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
  const auto missing = [&group] {
    std::vector<int> ranks;
    for (int member : group.transport->missing_ranks()) ranks.push_back(group.members[member]);
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
  const Wait wait(describe, missing);
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
    lost = true;
    throw std::runtime_error(std::string(error.what()) + ", while this rank was in " + describe());
  }
}

Array array_of(const void* in, void* out, int64_t count, Type type) {
  return {type, static_cast<const char*>(in), static_cast<char*>(out), checked(count)};
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
  bool sends;
  int other;  // the rank of the job at the other end
  int64_t bytes;
  alignas(void*) char request[sizeof(void*)];
};

template <class Start>
Number start(Number comm, bool sends, int other, int count, Start start) {
  Group& group = group_of(comm);
  auto message = std::make_unique<Message>(
      Message{sends, group.members.at(static_cast<size_t>(other)), checked(count), {}});
  start(running().library(), group.point_to_point, message->request);
  return reinterpret_cast<Number>(message.release());
}

void finish(Number& request) {
  if (!request) return;
  const std::unique_ptr<Message> message(reinterpret_cast<Message*>(std::exchange(request, 0)));
  const Library& library = running().library();
  const std::string end =
      (message->sends ? "to rank " : "from rank ") + std::to_string(message->other);
  const Wait wait(
      [&] { return "a permute " + end + ", of " + std::to_string(message->bytes) + " bytes"; },
      [] { return std::string(); });
  const uint64_t direction = mix(message->sends ? 1 : 2, static_cast<uint64_t>(message->other));
  const Recorded recorded(message->other, mix(direction, static_cast<uint64_t>(message->bytes)),
                          message->bytes, [&end] { return "a permute " + end; });
  Backoff backoff(running().crowded(), Backoff::Awaited::kMessages);
  for (;;) {
    int done = 0;
    alignas(int64_t) char status[kStatusBytes];
    check(library, library.test(message->request, &done, status), "MPI_Test");
    if (done) return;
    backoff.pause();
  }
}

// Programs that never import jaxmpi

// Installed in Python where MPI was started here, as no monitor of jaxmpi watches the rank. JAX
// waits at exit for all processes, of which some may wait for this one in a collective: so a rank
// that raises, or leaves by sys.exit with a code, ends the job before. Of other ranks, the thread
// that watches the waits tells the others of this node that they have left (`leave_when_idle`):
// Python does not say whether the end is that of the script, or `raise SystemExit(3)`.
//
// A program may catch what sys.exit raises, and go on. Then its outermost frame is not where it was
// at the call. A forked child has no part in any of it.
constexpr char kHooks[] = R"(
def _jaxmpi(end_job, begin_to_leave):
    import atexit, ctypes, os, sys, threading
    abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(end_job)
    leaving = ctypes.CFUNCTYPE(None)(begin_to_leave)
    show, leave, process, exits = sys.excepthook, sys.exit, os.getpid(), []
    def end(code):
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                pass
        abort(code)
    def excepthook(kind, value, trace):
        show(kind, value, trace)
        if os.getpid() == process:
            end(130 if issubclass(kind, KeyboardInterrupt) else 1)
    def exit(status=None):
        if threading.current_thread() is threading.main_thread():  # in others it ends the thread
            frame = sys._getframe()
            while frame.f_back:
                frame = frame.f_back
            exits[:] = [(frame, frame.f_lasti, status)]
        leave(status)
    def at_exit():
        if os.getpid() != process:
            return
        frame, place, status = exits[0] if exits else (None, 0, None)
        if status in (None, 0) or frame.f_lasti != place:
            leaving()
        elif isinstance(status, int):
            end((status & 255) or 1)
        else:
            print(status, file=sys.stderr)
            end(1)
    sys.excepthook, sys.exit = excepthook, exit
    atexit.register(at_exit)
_jaxmpi(%END_JOB%, %BEGIN_TO_LEAVE%)
del _jaxmpi
)";

void end_job(int code) {
  // The launcher names the rank that has ended first, unless this one is faster.
  if (lost) std::this_thread::sleep_for(kLauncherTime);
  say("ends the job, with code " + std::to_string(code) + ".");
  abort_job(code);
}

void begin_to_leave() { leaving = true; }

// What a rank has done so far, to see whether it still does something at the end of its program.
struct Work {
  int64_t messages, cpu_ns;

  static Work now() {
    timespec cpu = {};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
    return {record::messages().first, cpu.tv_sec * int64_t{1'000'000'000} + cpu.tv_nsec};
  }
};

// Tell the other ranks of this node that this one has left, when its program is at its end and
// nothing that it has started goes on: for kIdleNs it has neither communicated nor computed.
void leave_when_idle() {
  static int64_t since = 0;
  static Work then;
  if (!leaving) return;
  const Work work = Work::now();
  const bool works = work.messages != then.messages || record::current_event().in_progress ||
                     work.cpu_ns - then.cpu_ns > kIdleNs / 20;
  if (!since || works) {
    since = now();
    then = work;
  } else if (now() - since > kIdleNs) {
    running().leave();
    leaving = false;
  }
}

void install_hooks() {
  const auto ensure = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Ensure"));
  const auto release = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "PyGILState_Release"));
  const auto run =
      reinterpret_cast<int (*)(const char*)>(dlsym(RTLD_DEFAULT, "PyRun_SimpleString"));
  if (!ensure || !release || !run) return;
  std::string code = kHooks;
  const auto fill_in = [&code](const std::string& place, uintptr_t address) {
    code.replace(code.find(place), place.size(), std::to_string(address));
  };
  fill_in("%END_JOB%", reinterpret_cast<uintptr_t>(&end_job));
  fill_in("%BEGIN_TO_LEAVE%", reinterpret_cast<uintptr_t>(&begin_to_leave));
  const int state = ensure();
  run(code.c_str());
  release(state);
}

// At the end of the process, after Python's. A forked child has no part in it.
void at_exit(int code, void*) {
  const Job* known = job;
  if (!known || getpid() != process) return;
  if (PlainRecord* const record = plain_record; record && code == 0) record->leave_run();
  int over = 0;
  if (known->library().finalized(&over) != 0 || over) return;
  if (code != 0) abort_job(code);
  dump_at_end("the end");
  known->library().finalize();
}

// Say a sentence about a long wait, and where the record of the collectives is.
void say_and_dump(const std::string& text) {
  PlainRecord* const record = plain_record;
  say(record ? text + " " + dumped(*record, "a long wait") : text);
}

// Show what this rank does, and write the flight record if SIGUSR1 has asked for it. The thread
// that watches the waits calls it several times a second.
void show_record() {
  PlainRecord* const record = plain_record;
  if (!record) return;
  record->show();
  leave_when_idle();
  if (asked_for_record.exchange(false)) say("has SIGUSR1. " + dumped(*record, "SIGUSR1"));
}

// Let `jaxmpi top`, `jaxmpi timeline` and SIGUSR1 see a rank that no monitor of jaxmpi watches.
void start_record() {
  plain_record = new PlainRecord(running().place(), Recorded::waits_for);
  struct sigaction action = {};
  if (sigaction(SIGUSR1, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) {
    action.sa_handler = [](int) { asked_for_record = true; };
    action.sa_flags = SA_RESTART;
    sigaction(SIGUSR1, &action, nullptr);
  }
}

void begin() {
  std::call_once(began, [] {
    process = getpid();
    // Before MPI: its start waits for all ranks, and so does the exchange of where they are.
    watch_waits(say_and_dump, [] { abort_job(kFailed, "a long wait"); }, show_record);
    try {
      if (!can_reduce()) throw std::runtime_error("the processor has no AVX2");
      const Wait wait([] { return std::string("the start of JAX's collectives over MPI"); },
                      [] {
                        return std::string(
                            "all ranks of the job must call jax.distributed.initialize() and ask "
                            "for devices");
                      });
      Job* const made = new Job;
      job = made;
      made->join();
    } catch (const std::exception& error) {
      die(std::string("cannot start JAX's collectives over MPI: ") + error.what());
    }
    joined = true;
    if (running().started_mpi()) {
      on_exit(at_exit, nullptr);
      install_hooks();
      start_record();
    }
  });
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

// A monitor begins to watch this rank, after the library has started MPI, and writes its records.
void jaxmpi_leave_records_to_monitor() {
  if (PlainRecord* const record = plain_record.exchange(nullptr)) record->hide();
}

int MPIABI_Init_thread(int*, char***, int, int* provided) {
  begin();
  *provided = kThreadMultiple;
  return 0;
}

int MPIABI_Initialized(int* flag) {
  *flag = joined;
  return 0;
}

int MPIABI_Finalized(int* flag) {
  *flag = 0;
  return 0;
}

// XLA calls it while programs may still run; `at_exit`, or whoever has started MPI, ends it.
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
                    [] { return std::string(); });
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
    const Array array = array_of(in, out, count, type_of(type));
    if (alone(group, array)) return;
    carry_out(group, "an all-reduce", {Kind::Allreduce, op_of(op), 1, -1, -1}, array);
  });
}

int MPIABI_Allgather(const void* in, int count, Number type, void* out, int, Number, Number comm) {
  return reported([&] {
    Group& group = group_of(comm);
    const Array array = array_of(in, out, count, type_of(type));
    if (alone(group, array)) return;
    carry_out(group, "an all-gather", {Kind::Allgather, Op::Sum, 1, -1, -1}, array);
  });
}

// XLA gives all ranks the same count.
int MPIABI_Reduce_scatter(const void* in, void* out, const int* counts, Number type, Number op,
                          Number comm) {
  return reported([&] {
    Group& group = group_of(comm);
    const Array array = array_of(in, out, counts[0], type_of(type));
    if (alone(group, array)) return;
    carry_out(group, "a reduce-scatter", {Kind::ReduceScatter, op_of(op), 1, -1, -1}, array);
  });
}

// A step of an all-to-all, in which all ranks send to one at the same distance.
int MPIABI_Sendrecv(const void* in, int count, Number type, int dest, int, void* out, int, Number,
                    int source, int, Number comm, void*) {
  return reported([&] {
    Group& group = group_of(comm);
    const Array array = array_of(in, out, count, type_of(type));
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
