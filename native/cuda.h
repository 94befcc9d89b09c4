// The few functions of the CUDA driver that staging needs, from the library that runs: nothing here is compiled against CUDA.
#pragma once

#include <cstdint>
#include <string>

namespace jaxmpi {

class Cuda {
 public:
  using Stream = void*;
  using Event = void*;

  // library: the path of libcuda.
  explicit Cuda(const std::string& library);

  // The context of a stream, which is this thread's as long as the object lives.
  class Current {
   public:
    Current(const Cuda& cuda, Stream stream);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

    void* context() const { return context_; }

   private:
    const Cuda& cuda_;
    void* context_ = nullptr;
  };

  // All of these act in the current context, and throw std::runtime_error with the driver's words.
  char* pinned(int64_t bytes) const;  // page-locked memory of the host, which is never freed
  Event event() const;
  Stream stream() const;                                                      // one that waits for no other
  void copy(void* to, const void* from, int64_t bytes, Stream stream) const;  // starts; either side is the host's or the GPU's
  void record(Event event, Stream stream) const;
  void wait(Event event) const;
  void hold(Stream stream, Event event) const;  // what the stream is given from here on waits for the event
  void finish(Stream stream) const;

 private:
  void check(int code, const char* function) const;

  int (*stream_get_ctx_)(Stream, void**);
  int (*ctx_push_)(void*);
  int (*ctx_pop_)(void**);
  int (*host_alloc_)(void**, size_t, unsigned);
  int (*event_create_)(Event*, unsigned);
  int (*stream_create_)(Stream*, unsigned);
  int (*stream_wait_event_)(Stream, Event, unsigned);
  int (*event_record_)(Event, Stream);
  int (*event_synchronize_)(Event);
  int (*stream_synchronize_)(Stream);
  int (*memcpy_async_)(uintptr_t, uintptr_t, size_t, Stream);
  int (*get_error_string_)(int, const char**);
};

}  // namespace jaxmpi
