// A CUPTI for simulated GPUs: it tells torch's profiler which kernels ran, when, and when they were launched.
//
// What isn't here succeeds and does nothing (build.py).
#include <cupti.h>
#include <pthread.h>
#include <string.h>

#include <mutex>
#include <string>
#include <vector>

double sim_now();  // cuda.cpp: ms

namespace {

struct Kernel {
  const char* name;
  int device;
  size_t stream;
  uint32_t thread;
  double launched, begin, end;
};
auto& kernels = *new std::vector<Kernel>;  // not freed at the end: threads may run until then
auto& lock = *new std::mutex;
bool is_recording = false;
uint32_t number = 0;  // of a launch
constexpr size_t EACH = sizeof(CUpti_ActivityAPI) + sizeof(CUpti_ActivityKernel10);

struct Buffer {  // the profiler's
  uint8_t* bytes;
  size_t size;
};
auto& buffers = *new std::vector<Buffer>;
size_t room = 0;  // in the last one

CUpti_BuffersCallbackRequestFunc request;
CUpti_BuffersCallbackCompleteFunc complete;
CUpti_TimestampCallbackFunc ticks;  // the profiler's clock
double first_ms;
uint64_t first_tick;

uint64_t tick_of(double ms) {
  double rate = (ticks() - first_tick) / (sim_now() - first_ms);
  return first_tick + (int64_t)(rate * (ms - first_ms));
}

size_t size_of(CUpti_Activity* record) {
  return record->kind == CUPTI_ACTIVITY_KIND_RUNTIME ? sizeof(CUpti_ActivityAPI) : sizeof(CUpti_ActivityKernel10);
}

void write(uint8_t* to, const Kernel& kernel) {
  CUpti_ActivityAPI launch{CUPTI_ACTIVITY_KIND_RUNTIME, CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_v7000};
  launch.start = tick_of(kernel.launched);
  launch.end = launch.start + 1000;
  launch.threadId = kernel.thread;
  launch.correlationId = ++number;
  CUpti_ActivityKernel10 work{};
  work.kind = CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
  work.start = tick_of(kernel.begin);
  work.end = tick_of(kernel.end);
  work.deviceId = kernel.device;
  work.contextId = work.gridX = work.gridY = work.gridZ = work.blockY = work.blockZ = 1;
  work.blockX = 32;
  work.streamId = kernel.stream % 100003;
  work.correlationId = number;
  work.name = kernel.name;
  memcpy(to, &launch, sizeof launch);
  memcpy(to + sizeof launch, &work, sizeof work);
}

}  // namespace

void sim_note(const char* name, int device, void* stream, size_t thread, double launched, double begin, double end) {
  std::lock_guard<std::mutex> guard(lock);
  if (!is_recording) return;
  if (room < EACH) {  // the profiler looks for kernels only if it was asked for a buffer
    size_t most;
    Buffer& one = buffers.emplace_back();
    request(&one.bytes, &one.size, &most);
    room = one.size;
  }
  room -= EACH;
  kernels.push_back({name, device, (size_t)stream, (uint32_t)thread, launched, begin, end});
}

extern "C" {

CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc ask,
                                           CUpti_BuffersCallbackCompleteFunc give_back) {
  request = ask;
  complete = give_back;
  return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc given) {
  ticks = given;
  return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityEnable(CUpti_ActivityKind kind) {
  if (kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
    std::lock_guard<std::mutex> guard(lock);
    is_recording = true;
    first_ms = sim_now(), first_tick = ticks();
  }
  return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityDisable(CUpti_ActivityKind kind) {
  if (kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) is_recording = false;
  return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityFlushAll(uint32_t) {
  std::lock_guard<std::mutex> guard(lock);
  size_t next = 0;
  for (auto& buffer : buffers) {
    size_t at = 0;
    for (; next < kernels.size() && at + EACH <= buffer.size; at += EACH) write(buffer.bytes + at, kernels[next++]);
    complete(nullptr, 0, buffer.bytes, buffer.size, at);
  }
  buffers.clear(), kernels.clear(), room = 0;
  return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityGetNextRecord(uint8_t* buffer, size_t size, CUpti_Activity** record) {
  *record = *record ? (CUpti_Activity*)((uint8_t*)*record + size_of(*record)) : (CUpti_Activity*)buffer;
  return (uint8_t*)*record < buffer + size ? CUPTI_SUCCESS : CUPTI_ERROR_MAX_LIMIT_REACHED;
}

CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext, uint32_t, size_t* count) {
  *count = 0;
  return CUPTI_SUCCESS;
}

CUptiResult cuptiGetCallbackName(CUpti_CallbackDomain, uint32_t, const char** name) {
  *name = "cudaLaunchKernel";
  return CUPTI_SUCCESS;
}

CUptiResult cuptiGetVersion(uint32_t* version) {
  *version = CUPTI_API_VERSION;
  return CUPTI_SUCCESS;
}
}
