// libcuda.so.1 and libnvidia-ml.so.1 in one: what torch, launcher.py and doctor.py ask of NVIDIA's driver.
//
// cuBLAS opens libcuda.so.1 when torch is imported, and starts nothing; cuDeviceGetCount says 3, "not initialized", until
// the runtime starts.  NVML counts the machine's GPUs, whatever CUDA_VISIBLE_DEVICES says.
#include <string.h>

#include "devices.h"

static bool started = false;

extern "C" {

void start_driver() { started = true; }

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

// ---------------------------------------------------------------------------------------------------------------- NVML

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
