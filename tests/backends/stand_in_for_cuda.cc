// The functions of libcuda that jaxmpi calls, for arrays of the host. What a
// stream is given waits in its queue, and streams take no turns: what happens
// when is drawn at random, from CUDA_SEED; without one, everything happens as
// late as it can, when somebody waits for it; with CUDA_HURRIES, at once.
//
// CUDA_CONTEXTS: XLA's stream, which is NULL, is in that many contexts in turn.
// CUDA_WORKS_MS: before a message it computes for so long. CUDA_EVENTS: so many
// events can be made. CUDA_FAILS_AFTER: copies; after them, all fail.
// CUDA_FAILS_IN: one call of so many fails; what makes something fails for want
// of memory, and any other call breaks its context, in which nothing works or
// happens any more. CUDA_NO_KERNELS: the driver is too old for the kernel.
#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::recursive_mutex>;

struct Stream;

struct Event {
  void* context;
  std::shared_ptr<bool> done = std::make_shared<bool>(true);  // what was recorded last; those who wait for it keep it
  Stream* last = nullptr;                                     // the stream that is to say so
};

struct Task {
  std::function<bool()> ready;  // whether it can happen now
  std::function<void()> happen;
  Stream* waits_for = nullptr;
};

struct Stream {
  void* context;
  std::deque<Task> queue;
};

enum Code { kFine = 0, kNoMemory = 2, kInvalidPtx = 218, kInvalidHandle = 400, kNotReady = 600, kLaunchFailed = 719 };

std::recursive_mutex& mutex = *new std::recursive_mutex;
Stream& of_xla = *new Stream{};
std::vector<Stream*>& streams = *new std::vector<Stream*>{&of_xla};
std::set<void*>& broken = *new std::set<void*>;
std::mt19937_64& random_numbers = *new std::mt19937_64(0);
int64_t copies, events, messages;
thread_local std::vector<void*> current;

int64_t of(const char* name, int64_t otherwise) {
  const char* text = getenv(name);
  return text ? atoll(text) : otherwise;
}

bool seeded() { return getenv("CUDA_SEED") != nullptr; }

int64_t drawn(int64_t below) { return static_cast<int64_t>(random_numbers() % static_cast<uint64_t>(below)); }

Stream& known(void* stream) { return stream ? *static_cast<Stream*>(stream) : of_xla; }

bool can_go_on(const Stream& stream) {
  return !stream.queue.empty() && !broken.count(stream.context) && stream.queue.front().ready();
}

void step(Stream& stream) {
  const Task task = std::move(stream.queue.front());
  stream.queue.pop_front();
  task.happen();
}

// Something that can happen, does. Returns whether there was anything.
bool anything() {
  std::vector<Stream*> able;
  for (Stream* stream : streams) {
    if (can_go_on(*stream)) able.push_back(stream);
  }
  if (able.empty()) return false;
  step(*able[static_cast<size_t>(drawn(static_cast<int64_t>(able.size())))]);
  return true;
}

// As much as `until` needs, and not more than that where nothing is drawn.
int happens(Lock& lock, Stream& stream, const std::function<bool()>& until) {
  while (!until()) {
    if (broken.count(stream.context)) return kLaunchFailed;
    if (seeded()) {
      if (anything()) continue;
    } else {
      Stream* next = &stream;
      while (!next->queue.empty() && !can_go_on(*next) && next->queue.front().waits_for) {
        next = next->queue.front().waits_for;
      }
      if (can_go_on(*next)) {
        step(*next);
        continue;
      }
    }
    lock.unlock();  // the GPU computes, or a stream waits for what another
                    // thread is to give it
    usleep(200);
    lock.lock();
  }
  return broken.count(stream.context) ? kLaunchFailed : kFine;
}

// At each call some of what can happen does, or nothing; and the call may fail.
int called(bool makes = false) {
  if (seeded()) {
    for (int64_t turns = drawn(4); turns > 0 && anything(); --turns) {
    }
  }
  if (!current.empty() && broken.count(current.back())) return kLaunchFailed;
  const int64_t fails_in = of("CUDA_FAILS_IN", 0);
  if (!fails_in || drawn(fails_in) != 0) return kFine;
  if (!makes && !current.empty()) broken.insert(current.back());
  return makes ? kNoMemory : kLaunchFailed;
}

int queued(void* handle, Task task) {
  Stream& stream = known(handle);
  if (!task.ready) task.ready = [] { return true; };
  stream.queue.push_back(std::move(task));
  while (getenv("CUDA_HURRIES") && can_go_on(stream)) step(stream);
  return kFine;
}

}  // namespace

extern "C" {

// A new GPU, on which nobody has anything.
void stand_in_seed(uint64_t seed) {
  random_numbers.seed(seed);
  broken.clear();
  for (Stream* stream : streams) {
    if (stream != &of_xla) delete stream;
  }
  streams = {&of_xla};
}

// What a program of XLA does on its stream.
void stand_in_run(void* stream, void (*function)(void*), void* argument) {
  const Lock lock(mutex);
  queued(stream, {nullptr, [=] { function(argument); }});
}

int cuStreamGetCtx(void* stream, void** context) {
  const Lock lock(mutex);
  if (stream) {
    *context = known(stream).context;
    return kFine;
  }
  *context = reinterpret_cast<void*>(1 + messages++ % of("CUDA_CONTEXTS", 1));
  const auto until = Clock::now() + std::chrono::milliseconds(of("CUDA_WORKS_MS", 0));
  return queued(nullptr, {[=] { return Clock::now() >= until; }, [] {}});
}

int cuCtxPushCurrent_v2(void* context) {
  current.push_back(context);
  return kFine;
}

int cuCtxPopCurrent_v2(void** context) {
  *context = current.back();
  current.pop_back();
  return kFine;
}

int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  const Lock lock(mutex);
  if (const int code = called(true)) return code;
  *memory = malloc(bytes);
  return *memory ? kFine : kNoMemory;
}

int cuStreamCreate(void** stream, unsigned flags) {
  const Lock lock(mutex);
  if (flags != 1) return kInvalidHandle;  // any other would wait for the default stream
  if (const int code = called(true)) return code;
  streams.push_back(new Stream{current.back(), {}});
  *stream = streams.back();
  return kFine;
}

int cuEventCreate(void** event, unsigned) {
  const Lock lock(mutex);
  if (const int code = called(true)) return code;
  if (events++ == of("CUDA_EVENTS", 1 << 20)) return kNoMemory;
  *event = new Event{current.back()};
  return kFine;
}

int cuEventRecord(void* handle, void* of_stream) {
  const Lock lock(mutex);
  if (const int code = called()) return code;
  Event& event = *static_cast<Event*>(handle);
  const Stream& stream = known(of_stream);
  if (event.context != current.back() || (of_stream && stream.context != event.context)) return kInvalidHandle;
  const auto done = event.done = std::make_shared<bool>(false);
  event.last = &known(of_stream);
  return queued(of_stream, {nullptr, [done] { *done = true; }, nullptr});
}

int cuStreamWaitEvent(void* stream, void* handle, unsigned) {
  const Lock lock(mutex);
  if (const int code = called()) return code;
  const Event& event = *static_cast<Event*>(handle);
  return queued(stream, {[done = event.done] { return *done; }, [] {}, event.last});
}

int cuEventQuery(void* handle) {
  const Lock lock(mutex);
  if (const int code = called()) return code;
  const Event& event = *static_cast<Event*>(handle);
  return *event.done ? kFine : kNotReady;
}

int cuEventSynchronize(void* handle) {
  Lock lock(mutex);
  if (const int code = called()) return code;
  const Event& event = *static_cast<Event*>(handle);
  return event.last ? happens(lock, *event.last, [done = event.done] { return *done; }) : kFine;
}

int cuStreamSynchronize(void* handle) {
  Lock lock(mutex);
  if (const int code = called()) return code;
  Stream& stream = known(handle);
  bool done = false;
  queued(handle, {nullptr, [&done] { done = true; }});
  const int code = happens(lock, stream, [&] { return done; });
  if (!done) stream.queue.clear();  // of a broken context
  return code;
}

int cuMemcpyAsync(uintptr_t to, uintptr_t from, size_t bytes, void* stream) {
  const Lock lock(mutex);
  if (const int code = called()) return code;
  const int64_t fails_after = of("CUDA_FAILS_AFTER", -1);
  if (fails_after >= 0 && ++copies > fails_after) return kLaunchFailed;
  return queued(stream, {nullptr, [=] { memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes); }});
}

int cuModuleLoadData(void** module, const void* image) {
  const Lock lock(mutex);
  if (getenv("CUDA_NO_KERNELS")) return kInvalidPtx;
  *module = const_cast<void*>(image);
  return strstr(static_cast<const char*>(image), ".entry jaxmpi_gather(") ? kFine : kInvalidPtx;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = current.back();  // it is of its context
  return module && std::string(name) == "jaxmpi_gather" ? kFine : kInvalidHandle;
}

// Blocks come in any order.
int cuLaunchKernel(void* function, unsigned blocks, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void* stream,
                   void** parameters, void**) {
  struct Piece {
    char* to;
    const char* from;
    int64_t bytes;
  };
  const Lock lock(mutex);
  if (const int code = called()) return code;
  if (function != current.back() || blocks == 0) return kInvalidHandle;
  const auto* table = *static_cast<const Piece**>(parameters[0]);
  for (unsigned i = 0; i < blocks; ++i) {
    const unsigned block = (i * 7919u + 13u) % blocks;
    const bool each_once = blocks % 7919u != 0;
    queued(stream, {nullptr, [=] {
                      const Piece piece = table[each_once ? block : i];
                      memcpy(piece.to, piece.from, static_cast<size_t>(piece.bytes));
                    }});
  }
  return kFine;
}

int cuGetErrorName(int code, const char** text) {
  *text = code == kLaunchFailed    ? "CUDA_ERROR_LAUNCH_FAILED"
          : code == kInvalidHandle ? "CUDA_ERROR_INVALID_HANDLE"
          : code == kNoMemory      ? "CUDA_ERROR_OUT_OF_MEMORY"
                                   : "CUDA_ERROR_UNKNOWN";
  return kFine;
}

int cuGetErrorString(int code, const char** text) {
  *text = code == kLaunchFailed    ? "unspecified launch failure"
          : code == kInvalidHandle ? "invalid resource handle"
          : code == kNoMemory      ? "out of memory"
                                   : "unknown error";
  return kFine;
}

}  // extern "C"
