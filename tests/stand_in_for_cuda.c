/* The functions of libcuda that jaxmpi calls, for arrays of the host. Copies wait in a queue, as they do on a stream, until an
   event after them or the stream is waited for; with CUDA_HURRIES set they happen at once. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct { void* to; const void* from; size_t bytes; } queue[4096];
static size_t done, queued;
static size_t copies;

static void run_until(size_t end) {
  for (; done < end; ++done) memcpy(queue[done % 4096].to, queue[done % 4096].from, queue[done % 4096].bytes);
}

int cuStreamGetCtx(void* stream, void** context) { *context = stream; return 0; }
int cuCtxPushCurrent_v2(void* context) { (void)context; return 0; }
int cuCtxPopCurrent_v2(void** context) { (void)context; return 0; }
int cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  (void)flags;
  *memory = malloc(bytes);
  return *memory ? 0 : 2;
}
int cuEventCreate(void** event, unsigned flags) { (void)flags; *event = calloc(1, sizeof(size_t)); return 0; }
int cuEventRecord(void* event, void* stream) { (void)stream; *(size_t*)event = queued; return 0; }
int cuEventSynchronize(void* event) { run_until(*(size_t*)event); return 0; }
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
int cuGetErrorString(int code, const char** text) { *text = code == 719 ? "unspecified launch failure" : "out of memory"; return 0; }
