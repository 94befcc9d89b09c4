/* The functions of libcuda that jaxmpi calls, for arrays of the host. Copies wait in the queue of their stream, until an event
   after them or the stream is waited for; with CUDA_HURRIES set they happen at once. An event is of the context in which it was
   made, and CUDA_CONTEXTS contexts take turns. Before the copies of a message XLA's stream, which is NULL, computes for
   CUDA_WORKS_MS; other streams wait for that where they are told to. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct stream {
  void* context;
  struct { void* to; const void* from; size_t bytes; } queue[4096];
  size_t done, queued;
  double works_until;
};
struct event { struct stream* stream; size_t after; double works_until; void* context; };

static struct stream of_xla;
static size_t copies, events, messages;
static __thread void* current;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static long of(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text ? atol(text) : otherwise;
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

static struct stream* known(void* stream) { return stream ? stream : &of_xla; }

static void run_until(struct stream* stream, size_t end) {
  const double left = stream->works_until - seconds();
  if (end > stream->done && left > 0) usleep((useconds_t)(1e6 * left));
  for (; stream->done < end; ++stream->done) {
    const size_t i = stream->done % 4096;
    memcpy(stream->queue[i].to, stream->queue[i].from, stream->queue[i].bytes);
  }
}

int cuStreamGetCtx(struct stream* stream, void** context) {
  if (stream) {
    *context = stream->context;
    return 0;
  }
  pthread_mutex_lock(&mutex);
  *context = (void*)(1 + messages++ % of("CUDA_CONTEXTS", 1));
  of_xla.works_until = seconds() + 1e-3 * of("CUDA_WORKS_MS", 0);
  pthread_mutex_unlock(&mutex);
  return 0;
}
int cuCtxPushCurrent_v2(void* context) { current = context; return 0; }
int cuCtxPopCurrent_v2(void** context) { *context = current, current = NULL; return 0; }
int cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  (void)flags;
  *memory = malloc(bytes);
  return *memory ? 0 : 2;
}
int cuStreamCreate(struct stream** stream, unsigned flags) {
  (void)flags;
  *stream = calloc(1, sizeof **stream);
  (*stream)->context = current;
  return 0;
}
int cuEventCreate(struct event** event, unsigned flags) {
  (void)flags;
  if (events++ == (size_t)of("CUDA_EVENTS", 2 * of("CUDA_CONTEXTS", 1))) return 2; /* they are kept */
  *event = calloc(1, sizeof **event);
  (*event)->context = current;
  return 0;
}
int cuEventRecord(struct event* event, void* stream) {
  if (event->context != current) return 400;
  event->stream = known(stream);
  event->after = event->stream->queued;
  event->works_until = event->stream->works_until;
  return 0;
}
int cuStreamWaitEvent(struct stream* stream, struct event* event, unsigned flags) {
  (void)flags;
  if (event->works_until > stream->works_until) stream->works_until = event->works_until;
  return 0;
}
int cuEventSynchronize(struct event* event) { run_until(event->stream, event->after); return 0; }
int cuStreamSynchronize(void* stream) { run_until(known(stream), known(stream)->queued); return 0; }
int cuMemcpyAsync(uintptr_t to, uintptr_t from, size_t bytes, void* of_stream) {
  struct stream* stream = known(of_stream);
  const char* fails = getenv("CUDA_FAILS_AFTER");
  if (fails && ++copies > (size_t)atol(fails)) return 719;
  if (stream->queued - stream->done == 4096) { fprintf(stderr, "too many copies at once\n"); abort(); }
  const size_t i = stream->queued++ % 4096;
  stream->queue[i].to = (void*)to, stream->queue[i].from = (const void*)from, stream->queue[i].bytes = bytes;
  if (getenv("CUDA_HURRIES")) run_until(stream, stream->queued);
  return 0;
}
int cuGetErrorString(int code, const char** text) {
  *text = code == 719 ? "unspecified launch failure" : code == 400 ? "invalid resource handle" : "out of memory";
  return 0;
}
