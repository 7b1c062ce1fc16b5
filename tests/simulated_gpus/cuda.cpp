// A CUDA runtime for GPUs that aren't there: device memory is host memory, and all work is done when it is asked for.
//
// Written from NVIDIA's public headers.  It is loaded before torch (LD_PRELOAD), under the name of the true library.
// What it doesn't have is in stubs.py's generated file: such a function says its name, and returns "not supported".
//
// The devices: SIM_GPUS=8.0,7.5 are two, with these compute capabilities.
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

constexpr size_t GPU_MEMORY = 2ull << 30;  // bytes of each

struct Gpu {
  int number, major, minor;  // its place in the machine; its compute capability

  std::string name() const {
    return "Simulated GPU " + std::to_string(major) + "." + std::to_string(minor);
  }
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

bool started = false;  // a fork of a process that has started CUDA can't use it
bool forked_after_start = false;
thread_local int current = 0;  // the current device is a thread's own
thread_local cudaError_t last_error = cudaSuccess;

struct Block {
  size_t size;
  int device;
};
std::map<char*, Block> blocks;  // device memory, by address
std::map<char*, size_t> pinned;  // pinned host memory
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

template <class Found>
typename Found::iterator block_of(Found& found, const void* pointer) {  // the block that this address is in
  auto it = found.upper_bound((char*)pointer);
  return it == found.begin() ? found.end() : --it;
}

double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Event {
  double time = now();
};

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
  snprintf(properties->name, sizeof properties->name, "%s", gpu.name().c_str());
  if (!getenv("SIM_ZERO_UUID")) memcpy(properties->uuid.bytes, gpu.uuid_bytes().data(), 16);
  properties->totalGlobalMem = GPU_MEMORY;
  properties->major = gpu.major;
  properties->minor = gpu.minor;
  properties->multiProcessorCount = 8;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerBlockOptin = properties->sharedMemPerMultiprocessor = 99 << 10;
  properties->l2CacheSize = 40 << 20;
  properties->pciBusID = gpu.number + 1;
  for (int i = 0; i < 3; i++) {
    properties->maxThreadsDim[i] = i < 2 ? 1024 : 64;
    properties->maxGridSize[i] = i ? 65535 : 2147483647;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (auto error = start()) return error;
  if (!is_device(device)) return failed(cudaErrorInvalidDevice);
  Gpu gpu = visible_gpus()[device];
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? gpu.major
           : attribute == cudaDevAttrComputeCapabilityMinor ? gpu.minor
                                                            : 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
  snprintf(id, size, "0000:%02X:00.0", visible_gpus()[device].number + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() { return start(); }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = getenv("SIM_OLD_DRIVER") ? 11040 : CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

// ------------------------------------------------------------------------------------------------------------- errors

cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaError"; }

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInitializationError: return "initialization error";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidValue: return "invalid argument";
    default: return "operation not supported";
  }
}

// ------------------------------------------------------------------------------------------------------------- memory

cudaError_t cudaMalloc(void** pointer, size_t size) {
  if (auto error = start()) return error;
  std::lock_guard<std::mutex> guard(blocks_lock);
  size_t used = size;
  for (auto& block : blocks)
    if (block.second.device == current) used += block.second.size;
  if (used > GPU_MEMORY) return failed(cudaErrorMemoryAllocation);
  if (posix_memalign(pointer, 512, size ? size : 512)) return failed(cudaErrorMemoryAllocation);
  blocks[(char*)*pointer] = {size, current};
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  if (auto error = start()) return error;
  std::lock_guard<std::mutex> guard(blocks_lock);
  if (blocks.erase((char*)pointer)) free(pointer);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  std::lock_guard<std::mutex> guard(blocks_lock);
  *available = *total = GPU_MEMORY;
  for (auto& block : blocks)
    if (block.second.device == current) *available -= block.second.size;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  if (auto error = start()) return error;
  if (posix_memalign(pointer, 512, size ? size : 512)) return failed(cudaErrorMemoryAllocation);
  std::lock_guard<std::mutex> guard(blocks_lock);
  pinned[(char*)*pointer] = size;
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void** pointer, size_t size) { return cudaHostAlloc(pointer, size, 0); }

cudaError_t cudaFreeHost(void* pointer) {
  std::lock_guard<std::mutex> guard(blocks_lock);
  if (pinned.erase((char*)pointer)) free(pointer);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  std::lock_guard<std::mutex> guard(blocks_lock);
  pinned[(char*)pointer] = size;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* pointer) {
  std::lock_guard<std::mutex> guard(blocks_lock);
  pinned.erase((char*)pointer);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  std::lock_guard<std::mutex> guard(blocks_lock);
  *attributes = cudaPointerAttributes{};
  attributes->type = cudaMemoryTypeUnregistered;
  auto block = block_of(blocks, pointer);
  auto host = block_of(pinned, pointer);
  if (block != blocks.end() && (char*)pointer < block->first + block->second.size) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = block->second.device;
    attributes->devicePointer = (void*)pointer;
  } else if (host != pinned.end() && (char*)pointer < host->first + host->second) {
    attributes->type = cudaMemoryTypeHost;
    attributes->hostPointer = attributes->devicePointer = (void*)pointer;
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  memmove(to, from, size);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t) {
  memmove(to, from, size);
  return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t) {
  memmove(to, from, size);
  return cudaSuccess;
}

cudaError_t cudaMemset(void* to, int value, size_t size) {
  memset(to, value, size);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t) {
  memset(to, value, size);
  return cudaSuccess;
}

// -------------------------------------------------------------------------------------------------- streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  if (auto error = start()) return error;
  *stream = (cudaStream_t) new char;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

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

cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  if (auto error = start()) return error;
  *event = (cudaEvent_t) new Event;
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

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

// ------------------------------------------------------------------------------------------------------------ kernels
// torch registers its kernels when it is loaded.  None may be launched: cpu_kernels.cpp computes on the CPU.

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

cudaError_t refuse_kernel() {
  fprintf(stderr, "simulated GPU: torch launched a kernel that the CPU doesn't compute\n");
  abort();
}

cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return refuse_kernel(); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) { return refuse_kernel(); }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return refuse_kernel(); }

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}

int missing_driver_function() {
  fprintf(stderr, "simulated GPU: torch called a function that the driver lacks\n");
  return 801;  // not supported
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = (void*)missing_driver_function;  // torch looks up more than it calls
  if (found) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// --------------------------------------------------------------------------------------------------- driver and NVML
// cuBLAS opens libcuda.so.1 when torch is imported, and starts nothing; cuDeviceGetCount says 3, "not initialized", until
// the runtime starts.  NVML counts the machine's GPUs, whatever CUDA_VISIBLE_DEVICES says.

int cuInit(unsigned) {
  if (visible_gpus().empty()) return 100;  // CUDA_ERROR_NO_DEVICE
  started = true;
  return 0;
}

int cuDeviceGetCount(int* count) {
  if (!started) return 3;  // and CUDA_VISIBLE_DEVICES isn't read yet
  *count = visible_gpus().size();
  return 0;
}

int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {  // torch asks before it looks at a device
  *flags = 0;
  *active = started;
  return 0;
}

int cuDriverGetVersion(int* version) {
  *version = getenv("SIM_OLD_DRIVER") ? 11040 : 13020;
  return 0;
}

int nvmlInit_v2() { return 0; }
int nvmlInit() { return 0; }
int nvmlInitWithFlags(unsigned) { return 0; }
int nvmlShutdown() { return 0; }
const char* nvmlErrorString(int) { return "a simulated NVML's error"; }

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = all_gpus().size();
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = (void*)(size_t)(index + 1);
  return index < all_gpus().size() ? 0 : 2;  // NVML_ERROR_INVALID_ARGUMENT
}

int nvmlDeviceGetUUID(void* device, char* text, unsigned size) {
  snprintf(text, size, "%s", all_gpus()[(size_t)device - 1].uuid().c_str());
  return 0;
}

int nvmlDeviceGetName(void* device, char* text, unsigned size) {
  snprintf(text, size, "%s", all_gpus()[(size_t)device - 1].name().c_str());
  return 0;
}

int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  snprintf(text, size, "simulated");
  return 0;
}
}
