/* The functions of libcuda that jaxmpi calls, for arrays of the host. Copies wait in a queue, as they do on a stream, until an
   event after them or the stream is waited for; with CUDA_HURRIES set they happen at once. An event is of the context in which
   it was made, and CUDA_CONTEXTS contexts take turns. Before the copies of a message the stream computes for CUDA_WORKS_MS. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct event { size_t after; void* context; };

static struct { void* to; const void* from; size_t bytes; } queue[4096];
static size_t done, queued;
static size_t copies, events, messages;
static void* current;
static double works_until;

static long of(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text ? atol(text) : otherwise;
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

static void run_until(size_t end) {
  const double left = works_until - seconds();
  if (end > done && left > 0) usleep((useconds_t)(1e6 * left));
  for (; done < end; ++done) memcpy(queue[done % 4096].to, queue[done % 4096].from, queue[done % 4096].bytes);
}

int cuStreamGetCtx(void* stream, void** context) {
  (void)stream;
  *context = (void*)(1 + messages++ % of("CUDA_CONTEXTS", 1));
  works_until = seconds() + 1e-3 * of("CUDA_WORKS_MS", 0);
  return 0;
}
int cuCtxPushCurrent_v2(void* context) { current = context; return 0; }
int cuCtxPopCurrent_v2(void** context) { *context = current, current = NULL; return 0; }
int cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  (void)flags;
  *memory = malloc(bytes);
  return *memory ? 0 : 2;
}
int cuEventCreate(struct event** event, unsigned flags) {
  (void)flags;
  if (events++ == 2 * (size_t)of("CUDA_CONTEXTS", 1)) return 2; /* they are kept */
  *event = calloc(1, sizeof **event);
  (*event)->context = current;
  return 0;
}
int cuEventRecord(struct event* event, void* stream) {
  (void)stream;
  if (event->context != current) return 400;
  event->after = queued;
  return 0;
}
int cuEventSynchronize(struct event* event) { run_until(event->after); return 0; }
int cuStreamSynchronize(void* stream) { (void)stream; run_until(queued); return 0; }
int cuMemcpyAsync(uintptr_t to, uintptr_t from, size_t bytes, void* stream) {
  (void)stream;
  const char* fails = getenv("CUDA_FAILS_AFTER");
  if (fails && ++copies > (size_t)atol(fails)) return 719;
  if (queued - done == 4096) { fprintf(stderr, "too many copies at once\n"); abort(); }
  queue[queued % 4096].to = (void*)to, queue[queued % 4096].from = (const void*)from, queue[queued % 4096].bytes = bytes;
  ++queued;
  if (getenv("CUDA_HURRIES")) run_until(queued);
  return 0;
}
int cuGetErrorString(int code, const char** text) {
  *text = code == 719 ? "unspecified launch failure" : code == 400 ? "invalid resource handle" : "out of memory";
  return 0;
}
