// A CUDA runtime, a driver and NVML for GPUs that aren't there.  Device memory is host memory.
//
// NCCL's work is done in the background.  Kernels are computed when they are asked for: the host waits there until
// their stream has got so far.  Streams and events tell the truth about both.
//
// Written from NVIDIA's public headers.  It has what the tests need; build.py makes a stub of whatever else torch asks
// for, which says its name and ends the program.  So no kernel is launched: kernels.py computes on the CPU.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

// cupti.cpp: for torch's profiler
void sim_note(const char* name, int device, void* stream, size_t thread, double launched, double begin, double end);

namespace {

// ------------------------------------------------------------------------------------------------------- the machine

struct Gpu {
  int number, major, minor;  // its place in the machine; its compute capability

  std::array<unsigned char, 16> uuid_bytes() const {
    std::array<unsigned char, 16> bytes{0x51, 0x3a, 0, 0, 0, 0, 0x40, 0, 0x80};
    bytes[15] = number + 1;
    return bytes;
  }
  std::string uuid() const {
    std::string text = "GPU-";
    char two[3];
    for (int i = 0; i < 16; i++) {
      snprintf(two, sizeof two, "%02x", uuid_bytes()[i]);
      text += two;
      if (i == 3 || i == 5 || i == 7 || i == 9) text += '-';
    }
    return text;
  }
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

std::vector<Gpu> all_gpus() {  // SIM_GPUS=8.0,7.5: two, with these compute capabilities
  std::vector<Gpu> gpus;
  const char* text = getenv("SIM_GPUS");
  for (auto& capability : split(text ? text : "")) {
    Gpu gpu{(int)gpus.size(), 0, 0};
    sscanf(capability.c_str(), "%d.%d", &gpu.major, &gpu.minor);
    gpus.push_back(gpu);
  }
  return gpus;
}

// As CUDA reads CUDA_VISIBLE_DEVICES, once in each process: numbers or the beginnings of uuids.  The first that isn't
// there ends the list; one that stands there twice empties it.
const std::vector<Gpu>& visible_gpus() {
  static const std::vector<Gpu> found = [] {
    auto gpus = all_gpus();
    const char* text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) return gpus;
    std::vector<Gpu> seen;
    for (auto& word : split(text)) {
      const Gpu* hit = nullptr;
      for (auto& gpu : gpus) {
        bool is_number = !word.empty() && word.find_first_not_of("0123456789") == std::string::npos;
        bool is_uuid = word.size() > 4 && gpu.uuid().rfind(word, 0) == 0;
        if (is_number ? atoi(word.c_str()) == gpu.number : is_uuid) hit = &gpu;
      }
      if (!hit) break;
      for (auto& other : seen)
        if (other.number == hit->number) return std::vector<Gpu>{};
      seen.push_back(*hit);
    }
    return seen;
  }();
  return found;
}

// ----------------------------------------------------------------------------------------------------- this process

bool started = false;
bool forked_after_start = false;  // then CUDA can't be used here
std::atomic<unsigned> contexts{0};  // a bit for each device on which this process has a context, which takes memory
thread_local int current = 0;       // the current device is a thread's own
thread_local cudaError_t last_error = cudaSuccess;

struct Block {
  size_t size;
  cudaMemoryType type;  // of a device, or pinned memory of the host
  int device;
};
std::map<char*, Block> blocks;  // by address
std::mutex blocks_lock;

cudaError_t failed(cudaError_t error) { return last_error = error; }

cudaError_t start() {
  if (forked_after_start) return failed(cudaErrorInitializationError);
  if (getenv("SIM_OLD_DRIVER")) return failed(cudaErrorInsufficientDriver);
  if (visible_gpus().empty()) return failed(cudaErrorNoDevice);
  if (!started) {
    started = true;
    pthread_atfork(nullptr, nullptr, [] { forked_after_start = true; });
  }
  return cudaSuccess;
}

bool is_device(int device) { return device >= 0 && device < (int)visible_gpus().size(); }

cudaError_t allocate(void** pointer, size_t size, cudaMemoryType type) {
  if (auto error = start()) return error;
  if (type == cudaMemoryTypeDevice) contexts |= 1u << current;
  if (posix_memalign(pointer, 512, size ? size : 512)) return failed(cudaErrorMemoryAllocation);
  std::lock_guard<std::mutex> guard(blocks_lock);
  blocks[(char*)*pointer] = {size, type, current};
  return cudaSuccess;
}

// ------------------------------------------------------------------------------------------------- streams and events

double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Work {
  std::atomic<double> end{0};  // when it ended, in ms
};

struct Point {  // of a stream: reached when this time has come and these works have ended
  double time = 0;
  std::vector<std::shared_ptr<Work>> works;

  void add(const Point& other) {
    time = std::max(time, other.time);
    works.insert(works.end(), other.works.begin(), other.works.end());
    look();
  }
  void look() {
    for (auto& work : works) time = std::max(time, (double)work->end);
    std::erase_if(works, [](auto& work) { return work->end > 0; });
  }
  bool is_reached() {
    look();
    return works.empty() && time <= now();
  }
  void wait_for_works() {
    for (int turn = 0; look(), !works.empty(); turn++) turn < 1000 ? (void)sched_yield() : (void)usleep(100);
  }
  void wait() {
    wait_for_works();
    for (double left; (left = time - now()) > 0;) usleep(1000 * left + 1);
  }
};

struct Stream {
  int device;
  Point end;
};

struct Event {
  Point point;
};

auto& streams = *new std::map<cudaStream_t, Stream>;  // not freed at the end: threads may run until then
auto& streams_lock = *new std::mutex;

cudaStream_t named(cudaStream_t stream, int device) {  // each device has a stream 0 of its own
  return (size_t)stream > 2 ? stream : (cudaStream_t)(size_t)(-1 - device);
}

Point end_of(cudaStream_t stream, int device = current) {
  std::lock_guard<std::mutex> guard(streams_lock);
  return streams[named(stream, device)].end;
}

void go_on(cudaStream_t stream, const Point& point, int device = current) {
  std::lock_guard<std::mutex> guard(streams_lock);
  auto& known = streams[named(stream, device)];
  known.device = device;
  known.end.add(point);
}

void launch(int device, cudaStream_t stream, const char* name, std::shared_ptr<Work>* before,
            std::function<void()> work) {
  Point begin = end_of(stream, device);
  if (*before) begin.add({0, {*before}});
  auto mine = *before = std::make_shared<Work>();
  go_on(stream, {0, {mine}}, device);
  std::thread([=, launched = now(), thread = pthread_self()]() mutable {
    begin.wait();
    double from = now();
    work();
    sim_note(name, device, stream, thread, launched, from, now());
    mine->end = now();
  }).detach();
}

int missing_driver_function() {
  fprintf(stderr, "simulated GPU: torch called a function that the driver lacks\n");
  abort();
}

}  // namespace

double sim_now() { return now(); }

extern "C" {

void sim_copy(int device, cudaStream_t stream, void* to, const void* from, size_t size);

// ------------------------------------------------------------------------------------------------------------ devices

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  if (auto error = start()) return error;
  *count = visible_gpus().size();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (auto error = start()) return error;
  if (!is_device(device)) return failed(cudaErrorInvalidDevice);
  current = device;
  contexts |= 1u << device;  // since CUDA 12
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  if (auto error = start()) return error;
  *device = current;
  return cudaSuccess;
}

int sim_gpu_number() { return visible_gpus()[current].number; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (auto error = start()) return error;
  if (!is_device(device)) return failed(cudaErrorInvalidDevice);
  Gpu gpu = visible_gpus()[device];
  *properties = cudaDeviceProp{};
  snprintf(properties->name, sizeof properties->name, "Simulated GPU %d.%d", gpu.major, gpu.minor);
  memcpy(properties->uuid.bytes, gpu.uuid_bytes().data(), 16);
  properties->major = gpu.major;
  properties->minor = gpu.minor;
  properties->totalGlobalMem = 2ull << 30;
  properties->multiProcessorCount = 8;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = properties->maxThreadsPerMultiProcessor = 1024;  // the profiler divides by these
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->sharedMemPerBlock = properties->sharedMemPerBlockOptin = 48 << 10;
  properties->sharedMemPerMultiprocessor = 48 << 10;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  if (auto error = start()) return error;
  Point all;
  {
    std::lock_guard<std::mutex> guard(streams_lock);
    for (auto& [_, stream] : streams)
      if (stream.device == current) all.add(stream.end);
  }
  all.wait();
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = getenv("SIM_OLD_DRIVER") ? 11040 : CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = getenv("SIM_OLD_DRIVER") ? 11040 : CUDART_VERSION;
  return cudaSuccess;
}

// ------------------------------------------------------------------------------------------------------------- errors

cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInitializationError: return "initialization error";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNotReady: return "device not ready";
    default: return "an error of a simulated GPU";
  }
}

// ------------------------------------------------------------------------------------------------------------- memory

cudaError_t cudaMalloc(void** pointer, size_t size) { return allocate(pointer, size, cudaMemoryTypeDevice); }

cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) { return allocate(pointer, size, cudaMemoryTypeHost); }

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  std::lock_guard<std::mutex> guard(blocks_lock);
  *attributes = cudaPointerAttributes{};
  attributes->type = cudaMemoryTypeUnregistered;
  auto block = blocks.upper_bound((char*)pointer);
  if (block == blocks.begin()) return cudaSuccess;
  block--;
  if ((char*)pointer < block->first + block->second.size) {
    attributes->type = block->second.type;
    attributes->device = block->second.device;
    attributes->devicePointer = (void*)pointer;
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  sim_copy(current, stream, to, from, size);
  return cudaSuccess;
}

// -------------------------------------------------------------------------------------------------- streams and events

// Work that the GPU does in the background, NCCL's say: after what its stream has to do, and after another work.
void sim_launch(cudaStream_t stream, const char* name, std::shared_ptr<Work>* before, std::function<void()> work) {
  launch(current, stream, name, before, work);
}

// A kernel that the caller computes next: the host waits for the works before it.  SIM_KERNEL_US: a GPU's time for it.
void sim_kernel(int device, cudaStream_t stream, const char* name, bool blocks) {
  Point end = end_of(stream, device);
  double launched = now();
  end.wait_for_works();
  if (const char* us = getenv("SIM_KERNEL_US")) {
    double begin = std::max(end.time, now());
    go_on(stream, {begin + atof(us) / 1000}, device);
    sim_note(name, device, stream, pthread_self(), launched, begin, begin + atof(us) / 1000);
  }
  if (blocks) end_of(stream, device).wait();
}

void sim_copy(int device, cudaStream_t stream, void* to, const void* from, size_t size) {
  Point end = end_of(stream, device);
  end.look();
  if (end.works.empty()) {
    sim_kernel(device, stream, "copy", false);
    memmove(to, from, size);
  } else {
    std::shared_ptr<Work> none;
    launch(device, stream, "copy", &none, [=] { memmove(to, from, size); });
  }
}

void sim_wait(std::shared_ptr<Work>* work) {
  if (*work) Point{0, {*work}}.wait();
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  if (auto error = start()) return error;
  *stream = (cudaStream_t) new char;
  go_on(*stream, {});
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  end_of(stream).wait();
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return end_of(stream).is_reached() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  go_on(stream, ((Event*)event)->point);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  if (auto error = start()) return error;
  *event = (cudaEvent_t) new Event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  ((Event*)event)->point = end_of(stream);
  ((Event*)event)->point.add({now()});
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return Point(((Event*)event)->point).is_reached() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Point(((Event*)event)->point).wait();
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  Point first = ((Event*)from)->point, last = ((Event*)to)->point;
  if (!first.is_reached() || !last.is_reached()) return cudaErrorNotReady;
  *milliseconds = last.time - first.time;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete (Event*)event;
  return cudaSuccess;
}

// --------------------------------------------------------------------------------------------- torch's kernels, unused

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

// --------------------------------------------------------------------------------------------------- driver and NVML
// NVML counts the machine's GPUs, whatever CUDA_VISIBLE_DEVICES says, and starts nothing.

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = (void*)missing_driver_function;  // torch looks up more than it calls
  if (found) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {  // torch asks before it looks at a device
  *flags = 0;
  *active = contexts >> device & 1;
  return 0;
}

int nvmlInit() { return 0; }

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = all_gpus().size();
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = (void*)(size_t)index;
  return 0;
}

int nvmlDeviceGetUUID(void* device, char* text, unsigned size) {
  snprintf(text, size, "%s", all_gpus()[(size_t)device].uuid().c_str());
  return 0;
}
}
