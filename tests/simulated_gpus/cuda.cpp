// A CUDA runtime, a driver and NVML for GPUs that aren't there: device memory is host memory, and all work is done when
// it is asked for.
//
// Written from NVIDIA's public headers.  It has what the tests need; build.py makes a stub of whatever else torch asks
// for, which says its name and ends the program.  So no kernel is launched: kernels.py computes on the CPU.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <array>
#include <chrono>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

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
        if (is_number ? atoi(word.c_str()) == gpu.number : word.size() > 4 && gpu.uuid().rfind(word, 0) == 0) hit = &gpu;
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
thread_local int current = 0;     // the current device is a thread's own
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
  if (posix_memalign(pointer, 512, size ? size : 512)) return failed(cudaErrorMemoryAllocation);
  std::lock_guard<std::mutex> guard(blocks_lock);
  blocks[(char*)*pointer] = {size, type, current};
  return cudaSuccess;
}

double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Event {
  double time = now();
};

int missing_driver_function() {
  fprintf(stderr, "simulated GPU: torch called a function that the driver lacks\n");
  abort();
}

}  // namespace

extern "C" {

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
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() { return start(); }

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

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t) {
  memmove(to, from, size);
  return cudaSuccess;
}

// -------------------------------------------------------------------------------------------------- streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  if (auto error = start()) return error;
  *stream = (cudaStream_t) new char;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
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

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  ((Event*)event)->time = now();
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  *milliseconds = ((Event*)to)->time - ((Event*)from)->time;
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

int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {  // torch asks before it looks at a device
  *flags = 0;
  *active = started;
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
