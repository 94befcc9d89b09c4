#include "plain_rank.h"

#include <dlfcn.h>
#include <signal.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <thread>

#include "mpi_waits.h"
#include "plain_hooks.h"
#include "reduce.h"

namespace jaxmpi::mpi {
namespace {

constexpr int kFailed = 1;                                   // the exit code of a job
constexpr auto kLauncherTime = std::chrono::seconds(5);      // for the launcher to end the job
constexpr auto kRelayTime = std::chrono::milliseconds(100);  // for it to pass on our last lines
constexpr size_t kMostNamed = 16;                            // ranks in a sentence
// A rank at its end is idle if it does nothing at so many looks in a row, which are 0.2 s apart,
// and uses less CPU time than this in them.
constexpr int kIdleLooks = 10;
constexpr int64_t kIdleCpuNs = 100'000'000;

// From MPI_Init on. Never destroyed: a program may still run when Python ends.
std::atomic<Job*> job = nullptr;
std::once_flag began;
std::atomic<bool> joined = false;       // whether the ranks know each other
pid_t rank_pid = 0;                     // that has called MPI_Init
bool is_in_run = false;                 // whether `jaxmpi run` has started this rank
std::atomic<bool> has_monitor = false;  // whether jaxmpi.init has begun; its monitor comes later
std::atomic<bool> has_hooks = false;    // whether plain_hooks.py sees to the end of this rank
// Of a rank that has no monitor. Never destroyed.
std::atomic<PlainRecord*> record_of_rank = nullptr;
std::atomic<bool> asked_for_record = false;  // by SIGUSR1
std::atomic<bool> leaving = false;           // this rank is at its end, and has not failed
std::mutex leaving_mutex;                    // held while the watching thread may call MPI

// The ranks of the first collective that has failed because one of them has ended, as far as they
// had not come to it.
class LostRanks {
 public:
  void note(std::vector<int> ranks) {
    const std::lock_guard lock(mutex_);
    if (!ranks_) ranks_ = std::move(ranks);
  }
  // Return them; nothing where no collective has failed so.
  std::optional<std::vector<int>> ranks() {
    const std::lock_guard lock(mutex_);
    return ranks_;
  }

 private:
  std::mutex mutex_;
  std::optional<std::vector<int>> ranks_;
};

LostRanks& lost = *new LostRanks;  // never destroyed

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
  PlainRecord* const record = record_of_rank;
  if (!record || !record->has_named_folder() || getpid() != rank_pid) return;
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
  if (!is_in_run || lost.ranks() || rank.empty() || uname(&system) != 0) return;
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

void end_job(int code) {
  if (const auto ranks = lost.ranks()) {
    // Wait, so that MPI's launcher can name the rank that was lost: if this rank aborted first, the
    // launcher would name it. Where the other one has only left, the launcher does nothing.
    std::this_thread::sleep_for(kLauncherTime);
    tell_of_missing(*ranks);
  }
  say("ends the job, with code " + std::to_string(code) + ".");
  abort_job(code);
}

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

// Tell the other ranks that this one has left, when its program is at its end and seems to be idle:
// at kIdleLooks looks in a row it has neither communicated nor computed.
void leave_when_idle() {
  static int looks = 0;  // since `then`. (A time would go on while the process is suspended.)
  static Work then;
  const std::lock_guard lock(leaving_mutex);
  if (!leaving || !joined) return;
  const Work work = Work::now();
  const bool works =
      work.waits != then.waits || work.waits_now || work.cpu_ns - then.cpu_ns > kIdleCpuNs;
  if (looks == 0 || works) {
    looks = 1;
    then = work;
  } else if (++looks > kIdleLooks) {
    try {
      if (!mpi_runs() || running().leave()) leaving = false;
    } catch (const std::exception&) {  // of MPI, where a rank has failed: the job ends for that
      leaving = false;
    }
  }
}

// The kinds of process for plain_hooks.py: a rank that jaxmpi's monitor watches; one that the hooks
// watch; or not known, before JAX has made its devices, and in a process that is no rank.
enum Process { kWatched, kRank, kUnknown };

int process_kind() { return has_hooks ? kRank : has_monitor ? kWatched : kUnknown; }

template <class Function>
Function function_of_python(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

// Run code in the namespace of plain_hooks.py. Return false if this process does not run Python, or
// the code fails.
bool run_in_hooks(const std::string& code) {
  constexpr int kFileInput = 257;  // Py_file_input
  const auto ensure = function_of_python<int (*)()>("PyGILState_Ensure");
  const auto release = function_of_python<void (*)(int)>("PyGILState_Release");
  const auto new_namespace = function_of_python<void* (*)()>("PyDict_New");
  const auto run = function_of_python<void* (*)(const char*, int, void*, void*)>("PyRun_String");
  const auto print_error = function_of_python<void (*)()>("PyErr_Print");
  if (!ensure || !release || !new_namespace || !run || !print_error) return false;
  const int state = ensure();
  // Never released: the hooks live as long as Python. Python's GIL protects it.
  static void* names = nullptr;
  if (!names) names = new_namespace();
  const bool succeeds = run(code.c_str(), kFileInput, names, names);
  if (!succeeds) print_error();
  release(state);
  return succeeds;
}

// Install the hooks, once. Return whether they are.
bool install_hooks() {
  enum State { kAbsent, kBeingInstalled, kInstalled, kFailedToInstall };
  static std::atomic<State> state = kAbsent;
  State absent = kAbsent;
  if (state.compare_exchange_strong(absent, kBeingInstalled)) {
    std::ostringstream code;
    code << kPlainHooks << "\ninstall(" << reinterpret_cast<uintptr_t>(&process_kind) << ", "
         << reinterpret_cast<uintptr_t>(&end_job) << ", "
         << reinterpret_cast<uintptr_t>(&begin_to_leave) << ")\n";
    state = run_in_hooks(code.str()) ? kInstalled : kFailedToInstall;
  }
  // Another thread is at it. It needs Python's GIL, which this one may hold, and lets go in
  // sleep().
  while (state == kBeingInstalled) run_in_hooks("import time\ntime.sleep(0.001)\n");
  return state == kInstalled;
}

// Run when jaxlib is imported, and opens this library. The hooks are to be there before JAX makes
// its devices, as an error of the program may end the rank before. They are installed by Python's
// main thread a moment later: the loader's lock is held here, and another thread that waits for it
// with the GIL would wait for ever.
__attribute__((constructor)) void schedule_hooks() {
  is_in_run = std::getenv("JAXMPI_RUN_DIR");
  const char* const collectives = std::getenv("JAX_CPU_COLLECTIVES_IMPLEMENTATION");
  if (!collectives || std::string(collectives) != "mpi") return;
  const auto add_pending_call =
      function_of_python<int (*)(int (*)(void*), void*)>("Py_AddPendingCall");
  if (add_pending_call)
    add_pending_call(
        [](void*) {
          install_hooks();
          return 0;
        },
        nullptr);
}

// Run by exit(), after Python has shut down. A forked child has no part in it.
void at_end_of_process(int code, void*) {
  Job* const known = job;
  if (!known || getpid() != rank_pid) return;
  if (PlainRecord* const record = record_of_rank; record && code == 0) record->leave_run();
  const bool runs = mpi_runs();
  if (code != 0 && runs) abort_job(code);
  dump_at_end(code ? "code " + std::to_string(code) : "the end");
  const std::lock_guard lock(leaving_mutex);
  leaving = false;
  if (!runs) return;
  known->leave_node();  // MPI's end may wait for a rank that waits for this one
  if (known->started_mpi()) known->library().finalize();
}

// Say a sentence about a long wait, and where the record of the collectives is.
void say_and_dump(const std::string& text) {
  PlainRecord* const record = record_of_rank;
  say(record ? text + " " + dumped(*record, "a long wait") : text);
}

// Let the other ranks know if this one has left; show what it does; and write the flight record if
// SIGUSR1 has asked for it. The thread that watches the waits calls it several times a second.
void look_after_rank() {
  leave_when_idle();
  PlainRecord* const record = record_of_rank;
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
  record_of_rank = new PlainRecord(running().place(), [] { return running().missing_ranks(); });
  handle_signal();
}

// Return whether a rank has told this one that it has left. MPI may end in another thread.
bool has_left(int rank) {
  const std::lock_guard lock(leaving_mutex);
  return joined && mpi_runs() && running().has_left(rank);
}

// End the job for ranks that have left, or after a long wait if there are none. `jaxmpi run` blames
// the ranks that did not come: their lines precede the one about this rank's abort.
void end_waiting(const std::set<int>& left) {
  std::vector<int> missing(left.begin(), left.end());
  if (missing.empty() && joined) missing = running().missing_ranks().value_or(missing);
  tell_of_missing(missing);
  abort_job(kFailed, left.empty() ? "a long wait" : "a wait for a rank that has left");
}

}  // namespace

void abort_job(int code, const std::string& why) {
  if (rank_pid && getpid() != rank_pid) std::_Exit(code);  // a forked child is no rank
  dump_at_end(why.empty() ? "code " + std::to_string(code) : why);
  tell_of_abort(code);
  std::this_thread::sleep_for(kRelayTime);
  if (const Job* known = job) known->abort(code);
  std::_Exit(code);  // this rank has no communicator yet; the launcher ends the other ranks
}

void die(const std::string& text) {
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
  if (getpid() != rank_pid)
    throw std::runtime_error("a forked child of a rank cannot communicate: use spawn");
  return *known;
}

void note_lost(std::vector<int> ranks) { lost.note(std::move(ranks)); }

bool has_begun() { return joined; }

PlainRecord* plain_record() { return record_of_rank; }

void leave_rank_to_monitor() {
  has_monitor = true;
  if (PlainRecord* const record = record_of_rank.exchange(nullptr)) record->hide();
}

void begin_to_leave() { leaving = true; }

void begin() {
  std::call_once(began, [] {
    rank_pid = getpid();
    // Before MPI: its start waits for all ranks, and so does the exchange of where they are.
    watch_waits({say_and_dump, has_left, end_waiting, look_after_rank});
    try {
      if (!can_reduce()) throw std::runtime_error("the processor has no AVX2");
      const Wait wait([] { return std::string("the start of JAX's collectives over MPI"); },
                      [] {
                        return std::string(
                            "all ranks of the job must call jax.distributed.initialize() and ask "
                            "for devices");
                      },
                      {});
      Job* const made = new Job;
      job = made;
      made->join();
    } catch (const std::exception& error) {
      die(std::string("cannot start JAX's collectives over MPI: ") + error.what());
    }
    joined = true;
    if (!has_monitor) {
      on_exit(at_end_of_process, nullptr);
      // They remain where the program calls jaxmpi.init later.
      has_hooks = install_hooks() && run_in_hooks("begin()\n");
      start_record();
    }
  });
}

}  // namespace jaxmpi::mpi
