#include "cuda.h"

#include <dlfcn.h>

#include <chrono>
#include <stdexcept>

#include "gather_ptx.h"

namespace jaxmpi {
namespace {

constexpr unsigned kPortableAndMapped =
    1 | 2;  // CU_MEMHOSTALLOC_PORTABLE, _DEVICEMAP: pinned, and mapped, in every context
constexpr unsigned kDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING
constexpr unsigned kNonBlocking = 1;    // CU_STREAM_NON_BLOCKING
constexpr unsigned kBlockingSync =
    1;  // CU_EVENT_BLOCKING_SYNC: a rank that waits for its GPU leaves the core to the others
constexpr int kNotReady = 600;  // CUDA_ERROR_NOT_READY
constexpr auto kPolling =
    std::chrono::microseconds(100);  // a thread that sleeps wakes up some 50 µs late

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) throw std::runtime_error(std::string("libcuda has no ") + name);
}

}  // namespace

Cuda::Cuda(const std::string& library) {
  void* opened = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!opened)
    throw std::runtime_error("the CUDA driver cannot be opened: " + std::string(dlerror()));
  find(opened, "cuStreamGetCtx", stream_get_ctx_);
  find(opened, "cuCtxPushCurrent_v2", ctx_push_);
  find(opened, "cuCtxPopCurrent_v2", ctx_pop_);
  find(opened, "cuMemHostAlloc", host_alloc_);
  find(opened, "cuEventCreate", event_create_);
  find(opened, "cuStreamCreate", stream_create_);
  find(opened, "cuStreamWaitEvent", stream_wait_event_);
  find(opened, "cuEventRecord", event_record_);
  find(opened, "cuEventQuery", event_query_);
  find(opened, "cuEventSynchronize", event_synchronize_);
  find(opened, "cuStreamSynchronize", stream_synchronize_);
  find(opened, "cuMemcpyAsync", memcpy_async_);
  find(opened, "cuModuleLoadData", module_load_);
  find(opened, "cuModuleGetFunction", module_function_);
  find(opened, "cuLaunchKernel", launch_);
  find(opened, "cuGetErrorName", get_error_name_);
  find(opened, "cuGetErrorString", get_error_string_);
}

void* Cuda::context_of(Stream stream) const {
  void* context = nullptr;
  check(stream_get_ctx_(stream, &context), "cuStreamGetCtx");
  return context;
}

Cuda::Current::Current(const Cuda& cuda, void* context) : cuda_(cuda) {
  cuda.check(cuda.ctx_push_(context), "cuCtxPushCurrent");
}

Cuda::Current::~Current() {
  void* context = nullptr;
  cuda_.ctx_pop_(&context);
}

char* Cuda::pinned(int64_t bytes) const {
  void* memory = nullptr;
  check(host_alloc_(&memory, bytes, kPortableAndMapped), "cuMemHostAlloc");
  return static_cast<char*>(memory);
}

Cuda::Event Cuda::event() const {
  Event event = nullptr;
  check(event_create_(&event, kDisableTiming | kBlockingSync), "cuEventCreate");
  return event;
}

Cuda::Stream Cuda::stream() const {
  Stream stream = nullptr;
  check(stream_create_(&stream, kNonBlocking), "cuStreamCreate");
  return stream;
}

Cuda::Kernel Cuda::gather_kernel() const {
  void* module = nullptr;
  Kernel kernel = nullptr;
  if (module_load_(&module, kGatherPtx) != 0 ||
      module_function_(&kernel, module, "jaxmpi_gather") != 0)
    return nullptr;
  return kernel;
}

void Cuda::copy(const Piece& piece, Stream stream) const {
  const auto to = reinterpret_cast<uintptr_t>(piece.to),
             from = reinterpret_cast<uintptr_t>(piece.from);
  check(memcpy_async_(to, from, piece.bytes, stream), "cuMemcpyAsync");
}

void Cuda::gather(Kernel kernel, const Piece* pieces, int64_t count, Stream stream) const {
  constexpr unsigned kThreads = 256;
  void* parameters[] = {&pieces};
  check(launch_(kernel, static_cast<unsigned>(count), 1, 1, kThreads, 1, 1, 0, stream, parameters,
                nullptr),
        "cuLaunchKernel");
}

void Cuda::record(Event event, Stream stream) const {
  check(event_record_(event, stream), "cuEventRecord");
}

void Cuda::wait(Event event) const {
  const auto start = std::chrono::steady_clock::now();
  do {
    const int code = event_query_(event);
    if (code != kNotReady) return check(code, "cuEventQuery");
  } while (std::chrono::steady_clock::now() - start < kPolling);
  check(event_synchronize_(event), "cuEventSynchronize");
}

void Cuda::hold(Stream stream, Event event) const {
  check(stream_wait_event_(stream, event, 0), "cuStreamWaitEvent");
}

void Cuda::finish(Stream stream) const {
  check(stream_synchronize_(stream), "cuStreamSynchronize");
}

void Cuda::check(int code, const char* function) const {
  if (code == 0) return;
  const char *name = nullptr, *text = nullptr;
  get_error_name_(code, &name);
  get_error_string_(code, &text);
  throw std::runtime_error(std::string(function) +
                           " failed: " + (name ? name : "an unknown error") +
                           (text ? std::string(" (") + text + ")" : ""));
}

}  // namespace jaxmpi
