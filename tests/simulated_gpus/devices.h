// The simulated GPUs of this machine, and those of them that this process sees.  For the runtime, the driver and NVML.
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <array>
#include <sstream>
#include <string>
#include <vector>

constexpr size_t GPU_MEMORY = 2ull << 30;  // bytes of each

extern "C" void start_driver();  // libcuda.so.1: from here on it says that CUDA was started

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

inline std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

inline std::vector<Gpu> all_gpus() {  // SIM_GPUS=8.0,7.5: two, with these compute capabilities
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
inline const std::vector<Gpu>& visible_gpus() {
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
