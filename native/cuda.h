// The few functions of the CUDA driver that staging needs, from the library that runs: nothing here
// is compiled against CUDA.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace jaxmpi {

class Cuda {
 public:
  using Stream = void*;
  using Event = void*;
  using Kernel = void*;

  // A stretch of memory of the host or of the GPU, and where it is copied to.
  struct Piece {
    char* to;
    const char* from;
    int64_t bytes;
  };

  // library: the path of libcuda.
  explicit Cuda(const std::string& library);

  void* context_of(Stream stream) const;

  // Makes a context this thread's as long as the object lives.
  class Current {
   public:
    Current(const Cuda& cuda, void* context);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const Cuda& cuda_;
  };

  // All of these act in the current context, and throw std::runtime_error with the driver's
  // message.

  // Page-locked memory of the host, which the GPU can reach, and which is never freed.
  char* pinned(int64_t bytes) const;
  Event event() const;
  Stream stream() const;                               // one that waits for no other
  Kernel gather_kernel() const;                        // null where the driver cannot compile it
  void copy(const Piece& piece, Stream stream) const;  // starts
  void gather(Kernel kernel, const Piece* pieces, int64_t count,
              Stream stream) const;  // starts; the table is in pinned memory
  void record(Event event, Stream stream) const;
  void wait(Event event) const;                 // the host waits
  void hold(Stream stream, Event event) const;  // what the stream is given from here on waits
  void finish(Stream stream) const;             // the host waits for all that the stream was given

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
  int (*event_query_)(Event);
  int (*event_synchronize_)(Event);
  int (*stream_synchronize_)(Stream);
  int (*memcpy_async_)(uintptr_t, uintptr_t, size_t, Stream);
  int (*module_load_)(void**, const void*);
  int (*module_function_)(Kernel*, void*, const char*);
  int (*launch_)(Kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                 Stream, void**, void**);
  int (*get_error_name_)(int, const char**);
  int (*get_error_string_)(int, const char**);
};

}  // namespace jaxmpi
