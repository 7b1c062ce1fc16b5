// An NCCL for simulated GPUs: the processes of one machine meet in a file of shared memory.
//
// Declared after NVIDIA's public nccl.h.  Each call is done when it returns, so streams have nothing to do.  A rank that
// waits for longer than two minutes says so and fails.  Like the real one, it refuses one GPU for two ranks.
#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include <c10/util/Half.h>

enum Result { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum Op { SUM = 0, AVG = 4 };
enum Type { I64 = 4, F16 = 6, F32 = 7, F64 = 8 };
const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

extern "C" int sim_gpu_number();  // cuda.cpp: the current device's place in the machine

struct UniqueId {
  char bytes[128];
};

namespace {

constexpr size_t SLOT = 1 << 20;  // bytes that a rank shows to the others at once
constexpr double PATIENCE = 120;  // seconds

thread_local std::string last_error;

struct Shared {  // all zeros at first
  std::atomic<int> joined, arrived, rounds;
};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Comm {
  std::string name;
  int rank, size;
  Shared* shared = nullptr;
  size_t bytes = 0;

  char* slot(int of) { return (char*)shared + 4096 + of * SLOT; }

  bool wait_until(const std::function<bool()>& done, const char* what) {
    double end = now() + PATIENCE;
    for (int turn = 0; !done(); turn++) {
      if (now() > end) {
        last_error = std::string("simulated NCCL: rank ") + std::to_string(rank) + " waited in vain " + what;
        fprintf(stderr, "%s\n", last_error.c_str());
        return false;
      }
      turn < 1000 ? (void)sched_yield() : (void)usleep(200);
    }
    return true;
  }

  bool barrier() {
    int round = shared->rounds;
    if (shared->arrived.fetch_add(1) + 1 == size) {
      shared->arrived = 0;
      shared->rounds++;
      return true;
    }
    return wait_until([&] { return shared->rounds != round; }, "for the other ranks in a collective");
  }

  bool join() {
    bytes = 4096 + size * SLOT;
    std::string path = "/dev/shm/" + name;
    int file = open(path.c_str(), O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, bytes)) return false;
    shared = (Shared*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (shared == MAP_FAILED) return false;
    shared->joined++;
    bool all = wait_until([&] { return shared->joined == size; }, "for the other ranks to join");
    if (!barrier()) all = false;
    if (rank == 0) unlink(path.c_str());
    return all;
  }

  // Each rank shows `count` bytes, piece by piece; `look` sees each piece of all ranks.
  int show(const char* data, size_t count, const std::function<void(size_t, size_t)>& look) {
    for (size_t at = 0; at < count; at += SLOT) {
      size_t piece = std::min(SLOT, count - at);
      memcpy(slot(rank), data + at, piece);
      if (!barrier()) return SYSTEM_ERROR;
      look(at, piece);
      if (!barrier()) return SYSTEM_ERROR;
    }
    return SUCCESS;
  }
};

template <class T, class Compute>
void reduce_as(Comm* comm, char* to, size_t bytes, int op) {
  for (size_t i = 0; i < bytes / sizeof(T); i++) {
    Compute result{};
    for (int rank = 0; rank < comm->size; rank++) result += (Compute)((T*)comm->slot(rank))[i];
    ((T*)to)[i] = (T)(op == AVG ? result / comm->size : result);
  }
}

bool can_reduce(int type, int op) {
  if ((op == SUM || op == AVG) && (type == I64 || type == F16 || type == F32 || type == F64)) return true;
  last_error = "simulated NCCL: no reduction " + std::to_string(op) + " of type " + std::to_string(type);
  return false;
}

void reduce_slots(Comm* comm, char* to, size_t bytes, int type, int op) {
  switch (type) {
    case I64: return reduce_as<int64_t, int64_t>(comm, to, bytes, op);
    case F16: return reduce_as<c10::Half, float>(comm, to, bytes, op);
    case F32: return reduce_as<float, float>(comm, to, bytes, op);
    default: return reduce_as<double, double>(comm, to, bytes, op);
  }
}

}  // namespace

extern "C" {

const char* ncclGetErrorString(int code) {
  return code == SUCCESS ? "no error" : code == INVALID_USAGE ? "invalid usage" : "simulated NCCL: an error";
}

const char* ncclGetLastError(Comm*) { return last_error.c_str(); }

int ncclGetUniqueId(UniqueId* id) {
  memset(id, 0, sizeof *id);
  uint64_t random[2] = {};
  FILE* file = fopen("/dev/urandom", "rb");
  if (!file || fread(random, sizeof random, 1, file) != 1) return SYSTEM_ERROR;
  fclose(file);
  snprintf(id->bytes, sizeof id->bytes, "simulated-nccl-%016lx%016lx", random[0], random[1]);
  return SUCCESS;
}

int ncclCommInitRankConfig(Comm** made, int size, UniqueId id, int rank, void*) {
  Comm* comm = new Comm{id.bytes, rank, size};
  if (!comm->join()) return SYSTEM_ERROR;
  std::vector<int> gpus(size);
  int mine = sim_gpu_number();
  int result = comm->show((char*)&mine, sizeof mine, [&](size_t, size_t) {
    for (int i = 0; i < size; i++) memcpy(&gpus[i], comm->slot(i), sizeof(int));
  });
  if (result) return result;
  for (int i = 0; i < size; i++)
    if (i != rank && gpus[i] == mine) {
      last_error = "Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " + std::to_string(i) +
                   " both on the same simulated GPU";
      return INVALID_USAGE;
    }
  *made = comm;
  return SUCCESS;
}

int ncclCommDestroy(Comm* comm) {
  munmap(comm->shared, comm->bytes);
  delete comm;
  return SUCCESS;
}

int ncclCommFinalize(Comm*) { return SUCCESS; }  // torch 2.14 calls it

int ncclCommGetAsyncError(Comm*, int* error) {
  *error = SUCCESS;
  return SUCCESS;
}

int ncclGetVersion(int* version) {
  *version = 23007;  // torch 2.14 asks; this one came with it
  return SUCCESS;
}

int ncclCommCount(const Comm* comm, int* count) {
  *count = comm->size;
  return SUCCESS;
}

int ncclCommUserRank(const Comm* comm, int* rank) {
  *rank = comm->rank;
  return SUCCESS;
}

int ncclCommRegister(Comm*, void*, size_t, void** handle) {
  *handle = nullptr;
  return SUCCESS;
}

int ncclCommDeregister(Comm*, void*) { return SUCCESS; }
int ncclGroupStart() { return SUCCESS; }
int ncclGroupEnd() { return SUCCESS; }

int ncclAllReduce(const char* from, char* to, size_t count, int type, int op, Comm* comm, void*) {
  if (!can_reduce(type, op)) return INVALID_ARGUMENT;
  return comm->show(from, count * SIZES[type], [&](size_t at, size_t piece) {
    reduce_slots(comm, to + at, piece, type, op);
  });
}

int ncclBroadcast(const char* from, char* to, size_t count, int type, int root, Comm* comm, void*) {
  const char* data = comm->rank == root ? from : to;
  return comm->show(data, count * SIZES[type], [&](size_t at, size_t piece) {
    memcpy(to + at, comm->slot(root), piece);
  });
}

int ncclBcast(char* data, size_t count, int type, int root, Comm* comm, void* stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}

int ncclAllGather(const char* from, char* to, size_t count, int type, Comm* comm, void*) {
  size_t bytes = count * SIZES[type];
  return comm->show(from, bytes, [&](size_t at, size_t piece) {
    for (int i = 0; i < comm->size; i++) memcpy(to + i * bytes + at, comm->slot(i), piece);
  });
}

int ncclReduceScatter(const char* from, char* to, size_t count, int type, int op, Comm* comm, void*) {
  if (!can_reduce(type, op)) return INVALID_ARGUMENT;
  size_t bytes = count * SIZES[type];
  std::vector<char> mine(bytes);  // `to` may be a part of `from`
  for (int part = 0; part < comm->size; part++) {
    int result = comm->show(from + part * bytes, bytes, [&](size_t at, size_t piece) {
      if (part == comm->rank) reduce_slots(comm, mine.data() + at, piece, type, op);
    });
    if (result) return result;
  }
  memcpy(to, mine.data(), bytes);
  return SUCCESS;
}
}
