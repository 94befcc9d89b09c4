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
#include "plain_hooks.h"
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
constexpr int64_t kIdleNs = 2'000'000'000;     // without work: a rank at its end has left
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

// From MPI_Init on. Never destroyed: a program may still run when Python ends.
std::atomic<Job*> job = nullptr;
std::once_flag began;
std::atomic<bool> joined = false;  // whether the ranks know each other
pid_t process = 0;                 // that has called MPI_Init
// Whether a collective of this rank has failed because another rank has ended.
std::atomic<bool> saw_lost_rank = false;
thread_local std::string failure;       // the last one of this thread
bool is_in_run = false;                 // whether `jaxmpi run` has started this rank
std::atomic<bool> has_monitor = false;  // whether jaxmpi.init has begun; its monitor comes later
// Of a rank that has none. Never destroyed.
std::atomic<PlainRecord*> plain_record = nullptr;
std::atomic<bool> asked_for_record = false;  // by SIGUSR1
std::atomic<bool> leaving = false;           // this rank is at its end, and has not failed
std::mutex leaving_mutex;                    // held while `leave_when_idle` calls MPI
const std::vector<int> nobody;

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

// A line of output in which a rank tells `jaxmpi run` of a failure, its own or that of another
// rank. It does not pass it on. What MPI's launcher says may be lost (Open MPI 4).
// _job/process/failure.py reads the line.
std::string failure_line(const std::string& rank, int64_t pid, const std::string& host,
                         const std::string& cause) {
  std::ostringstream line;
  line << "jaxmpi-failure: [{\"rank\": " << rank << ", \"pid\": " << pid << ", \"host\": \"" << host
       << "\", \"cause\": " << cause << "}]\n";
  return line.str();
}

// Tell `jaxmpi run` that this rank ends the job, unless it fails because another one has.
void tell_of_abort(int code) {
  const std::string rank = digits_of_rank();
  utsname system = {};
  if (!is_in_run || saw_lost_rank || rank.empty() || uname(&system) != 0) return;
  write_to_stderr(failure_line(rank, getpid(), system.nodename,
                               "\"abort\", \"code\": " + std::to_string(code)));
}

// Tell `jaxmpi run` that others have waited for some ranks in vain.
void tell_of_missing(const std::vector<int>& ranks) {
  if (!is_in_run) return;
  for (const int rank : ranks) {
    const Member& member = job.load()->place().members[static_cast<size_t>(rank)];
    write_to_stderr(failure_line(std::to_string(rank), member.pid, member.host,
                                 "\"stalled\", \"joined\": true"));
  }
}

[[noreturn]] void abort_job(int code, const std::string& why = "") {
  if (process && getpid() != process) std::_Exit(code);  // a forked child is no rank
  dump_at_end(why.empty() ? "code " + std::to_string(code) : why);
  tell_of_abort(code);
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

// The ranks of the first collective that has failed because one of them has ended, as far as they
// had not come to it. Never destroyed.
std::vector<int>& all_lost_ranks() {
  static auto& ranks = *new std::vector<int>;
  return ranks;
}
std::mutex& lost_mutex() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

std::vector<int> lost_ranks() {
  const std::lock_guard lock(lost_mutex());
  return all_lost_ranks();
}

void note_lost(std::vector<int> ranks) {
  const std::lock_guard lock(lost_mutex());
  if (!saw_lost_rank) all_lost_ranks() = std::move(ranks);
  saw_lost_rank = true;
}

// A message on record, where this rank has no monitor of jaxmpi.
class Recorded {
 public:
  // A collective of a group
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
  // A message to or from one other rank
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
  const Wait wait(describe, missing, group.members);
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
  const Group* group;
  int place;  // in the group, of the rank at the other end
  bool sends;
  int64_t bytes;
  alignas(void*) char request[sizeof(void*)];
};

template <class Start>
Number start(Number comm, bool sends, int place, int count, Start start) {
  Group& group = group_of(comm);
  auto message = std::make_unique<Message>(Message{&group, place, sends, checked(count), {}});
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
  const std::vector<int> ranks = {other};
  const Wait wait(describe, [] { return std::string(); }, ranks);
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

// Ranks that no monitor of jaxmpi watches

void end_job(int code) {
  if (saw_lost_rank) {
    // Wait, so that MPI's launcher can name the rank that was lost: if this rank aborted first, the
    // launcher would name it. Where the other one has only left, the launcher does nothing.
    std::this_thread::sleep_for(kLauncherTime);
    tell_of_missing(lost_ranks());
  }
  say("ends the job, with code " + std::to_string(code) + ".");
  abort_job(code);
}

void begin_to_leave() { leaving = true; }

// What a rank has done so far, to see whether it still does something at the end of its program.
struct Work {
  int64_t waits, cpu_ns;
  bool waits_now;

  static Work now() {
    timespec cpu = {};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
    const auto [begun, current] = count_waits();
    return {begun, cpu.tv_sec * int64_t{1'000'000'000} + cpu.tv_nsec, current > 0};
  }
};

bool mpi_runs() {
  int over = 0;
  return running().library().finalized(&over) == 0 && !over;
}

// Tell the other ranks that this one has left, when its program is at its end and nothing that it
// has started goes on: for kIdleNs it has neither communicated nor computed.
void leave_when_idle() {
  static int64_t since = 0;
  static Work then;
  const std::lock_guard lock(leaving_mutex);
  if (!leaving || !joined) return;
  const Work work = Work::now();
  const bool works =
      work.waits != then.waits || work.waits_now || work.cpu_ns - then.cpu_ns > kIdleNs / 20;
  if (!since || works) {
    since = now();
    then = work;
  } else if (now() - since > kIdleNs) {
    leaving = mpi_runs() && !running().leave();
  }
}

template <class Function>
Function function_of_python(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

// Run plain_hooks.py in a namespace of its own, if this process runs Python. The hooks remain where
// the program calls jaxmpi.init later.
void install_hooks() {
  constexpr int kFileInput = 257;  // Py_file_input
  const auto ensure = function_of_python<int (*)()>("PyGILState_Ensure");
  const auto release = function_of_python<void (*)(int)>("PyGILState_Release");
  const auto new_namespace = function_of_python<void* (*)()>("PyDict_New");
  const auto run = function_of_python<void* (*)(const char*, int, void*, void*)>("PyRun_String");
  const auto print_error = function_of_python<void (*)()>("PyErr_Print");
  if (!ensure || !release || !new_namespace || !run || !print_error) return;
  std::ostringstream code;
  code << kPlainHooks << "\ninstall(" << reinterpret_cast<uintptr_t>(&end_job) << ", "
       << reinterpret_cast<uintptr_t>(&begin_to_leave) << ")\n";
  const int state = ensure();
  // The namespace is never released: the hooks live as long as Python.
  void* const names = new_namespace();
  if (!run(code.str().c_str(), kFileInput, names, names)) print_error();
  release(state);
}

// Run by exit(), after Python has shut down. A forked child has no part in it.
void at_exit(int code, void*) {
  const Job* known = job;
  if (!known || getpid() != process) return;
  if (PlainRecord* const record = plain_record; record && code == 0) record->leave_run();
  const bool runs = mpi_runs();
  if (code != 0 && runs) abort_job(code);
  dump_at_end(code ? "code " + std::to_string(code) : "the end");
  const std::lock_guard lock(leaving_mutex);
  leaving = false;
  if (runs && known->started_mpi()) known->library().finalize();
}

// Say a sentence about a long wait, and where the record of the collectives is.
void say_and_dump(const std::string& text) {
  PlainRecord* const record = plain_record;
  say(record ? text + " " + dumped(*record, "a long wait") : text);
}

// Let the other ranks know if this one has left; show what it does; and write the flight record if
// SIGUSR1 has asked for it. The thread that watches the waits calls it several times a second.
void look_after_rank() {
  leave_when_idle();
  PlainRecord* const record = plain_record;
  if (!record) return;
  record->show();
  if (asked_for_record.exchange(false)) say("has SIGUSR1. " + dumped(*record, "SIGUSR1"));
}

// What MPICH does at a SIGUSR1, by which its launcher tells of processes that have failed; or null.
void (*signal_handler_of_mpi)(int) = nullptr;

bool belongs_to_mpi(const struct sigaction& action) {
  if (action.sa_flags & SA_SIGINFO) return false;
  Dl_info info = {};
  const auto handler = reinterpret_cast<void*>(action.sa_handler);
  return dladdr(handler, &info) && running().library().path == info.dli_fname;
}

// Have SIGUSR1 ask for the flight record, unless the program does something else at it.
void handle_signal() {
  struct sigaction action = {};
  if (sigaction(SIGUSR1, nullptr, &action) != 0) return;
  if (action.sa_handler != SIG_DFL) {
    if (!belongs_to_mpi(action)) return;
    signal_handler_of_mpi = action.sa_handler;
  }
  action.sa_handler = [](int number) {
    asked_for_record = true;
    if (signal_handler_of_mpi) signal_handler_of_mpi(number);
  };
  action.sa_flags = SA_RESTART;
  sigaction(SIGUSR1, &action, nullptr);
}

// Let `jaxmpi top`, `jaxmpi timeline` and SIGUSR1 see a rank that no monitor of jaxmpi watches.
void start_record() {
  plain_record = new PlainRecord(running().place(), Recorded::waits_for);
  handle_signal();
}

// End the job after a long wait, or for ranks that have left. For `jaxmpi run` the ranks that did
// not come have failed, rather than this one, of which the line about its abort comes after theirs.
void end_waiting(const std::vector<int>& left) {
  if (!left.empty()) {
    tell_of_missing(left);
  } else if (joined) {
    tell_of_missing(Recorded::waits_for().value_or(std::vector<int>()));
  }
  abort_job(kFailed, "a long wait");
}

void begin() {
  std::call_once(began, [] {
    process = getpid();
    is_in_run = std::getenv("JAXMPI_RUN_DIR");
    // Before MPI: its start waits for all ranks, and so does the exchange of where they are.
    watch_waits({say_and_dump, [](int rank) { return joined && running().has_left(rank); },
                 end_waiting, look_after_rank});
    try {
      if (!can_reduce()) throw std::runtime_error("the processor has no AVX2");
      const Wait wait([] { return std::string("the start of JAX's collectives over MPI"); },
                      [] {
                        return std::string(
                            "all ranks of the job must call jax.distributed.initialize() and ask "
                            "for devices");
                      },
                      nobody);
      Job* const made = new Job;
      job = made;
      made->join();
    } catch (const std::exception& error) {
      die(std::string("cannot start JAX's collectives over MPI: ") + error.what());
    }
    joined = true;
    if (!has_monitor) {
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

// jaxmpi.init begins: a monitor watches this rank from now on, and writes its records.
void jaxmpi_leave_rank_to_monitor() {
  has_monitor = true;
  if (PlainRecord* const record = plain_record.exchange(nullptr)) record->hide();
}

// The monitor of a rank calls it when the rank has come to its end, and waits for the other ranks.
void jaxmpi_begin_to_leave() { begin_to_leave(); }

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
