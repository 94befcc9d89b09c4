#include "cuda.h"

#include <dlfcn.h>

#include <stdexcept>

namespace jaxmpi {
namespace {

constexpr unsigned kPortable = 1;       // CU_MEMHOSTALLOC_PORTABLE: pinned for every context
constexpr unsigned kDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING
constexpr unsigned kNonBlocking = 1;    // CU_STREAM_NON_BLOCKING
constexpr unsigned kBlockingSync = 1;   // CU_EVENT_BLOCKING_SYNC: a rank that waits for its GPU leaves the core to the others

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) throw std::runtime_error(std::string("libcuda has no ") + name);
}

}  // namespace

Cuda::Cuda(const std::string& library) {
  void* opened = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!opened) throw std::runtime_error("the CUDA driver cannot be opened: " + std::string(dlerror()));
  find(opened, "cuStreamGetCtx", stream_get_ctx_);
  find(opened, "cuCtxPushCurrent_v2", ctx_push_);
  find(opened, "cuCtxPopCurrent_v2", ctx_pop_);
  find(opened, "cuMemHostAlloc", host_alloc_);
  find(opened, "cuEventCreate", event_create_);
  find(opened, "cuStreamCreate", stream_create_);
  find(opened, "cuStreamWaitEvent", stream_wait_event_);
  find(opened, "cuEventRecord", event_record_);
  find(opened, "cuEventSynchronize", event_synchronize_);
  find(opened, "cuStreamSynchronize", stream_synchronize_);
  find(opened, "cuMemcpyAsync", memcpy_async_);
  find(opened, "cuGetErrorString", get_error_string_);
}

Cuda::Current::Current(const Cuda& cuda, Stream stream) : cuda_(cuda) {
  cuda.check(cuda.stream_get_ctx_(stream, &context_), "cuStreamGetCtx");
  cuda.check(cuda.ctx_push_(context_), "cuCtxPushCurrent");
}

Cuda::Current::~Current() {
  void* context = nullptr;
  cuda_.ctx_pop_(&context);
}

char* Cuda::pinned(int64_t bytes) const {
  void* memory = nullptr;
  check(host_alloc_(&memory, bytes, kPortable), "cuMemHostAlloc");
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

void Cuda::copy(void* to, const void* from, int64_t bytes, Stream stream) const {
  check(memcpy_async_(reinterpret_cast<uintptr_t>(to), reinterpret_cast<uintptr_t>(from), bytes, stream), "cuMemcpyAsync");
}

void Cuda::record(Event event, Stream stream) const { check(event_record_(event, stream), "cuEventRecord"); }

void Cuda::wait(Event event) const { check(event_synchronize_(event), "cuEventSynchronize"); }

void Cuda::hold(Stream stream, Event event) const { check(stream_wait_event_(stream, event, 0), "cuStreamWaitEvent"); }

void Cuda::finish(Stream stream) const { check(stream_synchronize_(stream), "cuStreamSynchronize"); }

void Cuda::check(int code, const char* function) const {
  if (code == 0) return;
  const char* text = nullptr;
  get_error_string_(code, &text);
  throw std::runtime_error(std::string(function) + " failed: " + (text ? text : "an unknown error"));
}

}  // namespace jaxmpi
