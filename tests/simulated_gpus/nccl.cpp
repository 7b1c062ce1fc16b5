// An NCCL for simulated GPUs: the processes of one machine meet in a file of shared memory.
//
// Declared after NVIDIA's public nccl.h.  Each call is done when it returns, so streams have nothing to do.  A rank that
// waits for longer than SIM_NCCL_TIMEOUT seconds (120) says so and fails.  As the true one, it refuses one GPU for two.
#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>
#include <c10/util/Half.h>

enum Result { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum Op { SUM, PROD, MAX, MIN, AVG, FIRST_OWN_OP };
enum Type { I8, U8, I32, U32, I64, U64, F16, F32, F64, BF16, F8E4M3, F8E5M2, TYPES };
const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

extern "C" int sim_gpu_number();                 // cuda_runtime.cpp: the current device's place in the machine
extern "C" int cudaMalloc(void**, size_t);
extern "C" int cudaFree(void*);

struct UniqueId {
  char bytes[128];
};

namespace {

constexpr size_t SLOT = 1 << 20;   // bytes that a rank shows to the others at once
constexpr size_t MAIL = 64 << 10;  // bytes on the way from one rank to another

thread_local std::string last_error;

struct Mailbox {
  std::atomic<size_t> bytes;  // 0: empty
  char data[MAIL];
};

struct Shared {  // all zeros at first
  std::atomic<int> joined, arrived, rounds;
};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Comm {
  std::string name;
  int rank, size, splits = 0;
  std::atomic<bool> aborted{false};
  Shared* shared = nullptr;
  size_t bytes = 0;

  char* slot(int of) { return (char*)shared + 4096 + of * SLOT; }
  Mailbox* mailbox(int from, int to) {
    return (Mailbox*)((char*)shared + 4096 + size * SLOT) + from * size + to;
  }

  bool wait_until(const std::function<bool()>& done, const char* what) {
    const char* text = getenv("SIM_NCCL_TIMEOUT");
    double end = now() + (text ? atof(text) : 120);
    for (int turn = 0; !done(); turn++) {
      if (aborted || now() > end) {
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
    bytes = 4096 + size * SLOT + size * size * sizeof(Mailbox);
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
  bool show(const char* data, size_t count, const std::function<void(size_t, size_t)>& look) {
    for (size_t at = 0; at < count; at += SLOT) {
      size_t piece = std::min(SLOT, count - at);
      if (data) memcpy(slot(rank), data + at, piece);
      if (!barrier()) return false;
      look(at, piece);
      if (!barrier()) return false;
    }
    return true;
  }
};

struct OwnOp {  // ncclRedOpCreatePreMulSum: x -> factor x, then the sum
  double factor;
};
std::vector<OwnOp> own_ops;

template <class T, class Compute>
void reduce_as(Comm* comm, char* to, size_t bytes, int op) {
  size_t count = bytes / sizeof(T);
  double factor = op >= FIRST_OWN_OP ? own_ops[op - FIRST_OWN_OP].factor : 1;
  for (size_t i = 0; i < count; i++) {
    Compute result{};
    for (int rank = 0; rank < comm->size; rank++) {
      Compute x = (Compute)((T*)comm->slot(rank))[i];
      if (op >= FIRST_OWN_OP) x = (Compute)(x * factor);
      if (rank == 0) result = x;
      else if (op == PROD) result = result * x;
      else if (op == MAX) result = std::max(result, x);
      else if (op == MIN) result = std::min(result, x);
      else result = result + x;
    }
    if (op == AVG) result = result / (Compute)comm->size;
    ((T*)to)[i] = (T)result;
  }
}

void reduce_slots(Comm* comm, char* to, size_t bytes, int type, int op) {
  switch (type) {
    case I8: return reduce_as<int8_t, int8_t>(comm, to, bytes, op);
    case U8: return reduce_as<uint8_t, uint8_t>(comm, to, bytes, op);
    case I32: return reduce_as<int32_t, int32_t>(comm, to, bytes, op);
    case U32: return reduce_as<uint32_t, uint32_t>(comm, to, bytes, op);
    case I64: return reduce_as<int64_t, int64_t>(comm, to, bytes, op);
    case U64: return reduce_as<uint64_t, uint64_t>(comm, to, bytes, op);
    case F16: return reduce_as<c10::Half, float>(comm, to, bytes, op);
    case F32: return reduce_as<float, float>(comm, to, bytes, op);
    case F64: return reduce_as<double, double>(comm, to, bytes, op);
    case BF16: return reduce_as<c10::BFloat16, float>(comm, to, bytes, op);
    case F8E4M3: return reduce_as<c10::Float8_e4m3fn, float>(comm, to, bytes, op);
    default: return reduce_as<c10::Float8_e5m2, float>(comm, to, bytes, op);
  }
}

// Sends and receives wait for the end of their group: then all of them go on in turn, so that none blocks another.
struct Message {
  Comm* comm;
  char* data;
  size_t bytes;
  int peer;
  bool is_send;
  size_t done = 0;
};
thread_local std::vector<Message> messages;
thread_local int groups = 0;

bool go_on(Message& message) {  // whether a piece could be sent or received
  Comm* comm = message.comm;
  Mailbox* box = message.is_send ? comm->mailbox(comm->rank, message.peer) : comm->mailbox(message.peer, comm->rank);
  if (message.is_send != (box->bytes == 0)) return false;
  if (message.is_send) {
    size_t piece = std::min(MAIL, message.bytes - message.done);
    memcpy(box->data, message.data + message.done, piece);
    box->bytes = piece;
    message.done += piece;
  } else {
    size_t piece = std::min<size_t>(box->bytes, message.bytes - message.done);
    memcpy(message.data + message.done, box->data, piece);
    message.done += piece;
    box->bytes = 0;
  }
  return true;
}

bool all_moved() {  // moves what can be moved; messages between the same two ranks keep their order
  bool waiting = false;
  for (size_t i = 0; i < messages.size(); i++) {
    Message& message = messages[i];
    if (message.done == message.bytes) continue;
    bool first = std::none_of(messages.begin(), messages.begin() + i, [&](Message& other) {
      return other.done < other.bytes && other.peer == message.peer && other.is_send == message.is_send;
    });
    while (first && message.done < message.bytes && go_on(message)) {}
    waiting |= message.done < message.bytes;
  }
  return !waiting;
}

int move_messages() {
  if (groups || messages.empty()) return SUCCESS;
  bool moved = messages[0].comm->wait_until(all_moved, "for a send or a receive");
  messages.clear();
  return moved ? SUCCESS : SYSTEM_ERROR;
}

int result_of(bool done) { return done ? SUCCESS : SYSTEM_ERROR; }

int join(Comm** made, const std::string& name, int rank, int size) {
  Comm* comm = new Comm;
  comm->name = name;
  comm->rank = rank;
  comm->size = size;
  if (!comm->join()) return SYSTEM_ERROR;
  std::vector<int> gpus(size);
  int mine = sim_gpu_number();
  bool shown = comm->show((char*)&mine, sizeof mine, [&](size_t, size_t) {
    for (int i = 0; i < size; i++) memcpy(&gpus[i], comm->slot(i), sizeof(int));
  });
  if (!shown) return SYSTEM_ERROR;
  for (int i = 0; i < size; i++)
    if (i != rank && gpus[i] == mine) {
      last_error = "Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " + std::to_string(i) +
                   " both on the same simulated GPU";
      return INVALID_USAGE;
    }
  *made = comm;
  return SUCCESS;
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  *version = SIM_NCCL_VERSION;
  return SUCCESS;
}

const char* ncclGetErrorString(int code) {
  return code == SUCCESS ? "no error" : code == INVALID_USAGE ? "invalid usage" : "simulated NCCL: a system error";
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

int ncclCommInitRank(Comm** comm, int size, UniqueId id, int rank) { return join(comm, id.bytes, rank, size); }

int ncclCommInitRankConfig(Comm** comm, int size, UniqueId id, int rank, void*) {
  return join(comm, id.bytes, rank, size);
}

int ncclCommInitRankScalable(Comm** comm, int size, int rank, int, UniqueId* ids, void*) {
  return join(comm, ids[0].bytes, rank, size);
}

int ncclCommSplit(Comm* comm, int color, int key, Comm** made, void*) {
  struct Wish {
    int color, key, rank;
  } mine{color, key, comm->rank};
  std::vector<Wish> same;
  bool shown = comm->show((char*)&mine, sizeof mine, [&](size_t, size_t) {
    for (int i = 0; i < comm->size; i++) {
      Wish wish;
      memcpy(&wish, comm->slot(i), sizeof wish);
      if (wish.color == color) same.push_back(wish);
    }
  });
  if (!shown) return SYSTEM_ERROR;
  std::string name = comm->name + "-" + std::to_string(comm->splits++) + "-" + std::to_string(color);
  *made = nullptr;
  if (color < 0) return SUCCESS;
  std::stable_sort(same.begin(), same.end(), [](const Wish& a, const Wish& b) { return a.key < b.key; });
  int rank = 0;
  while (same[rank].rank != comm->rank) rank++;
  return join(made, name, rank, same.size());
}

int ncclCommDestroy(Comm* comm) {
  munmap(comm->shared, comm->bytes);
  delete comm;
  return SUCCESS;
}

int ncclCommAbort(Comm* comm) {  // the memory stays: another thread may still be waiting in it
  comm->aborted = true;
  return SUCCESS;
}

int ncclCommFinalize(Comm*) { return SUCCESS; }

int ncclCommGetAsyncError(Comm*, int* error) {
  *error = SUCCESS;
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
int ncclMemAlloc(void** pointer, size_t size) { return cudaMalloc(pointer, size); }
int ncclMemFree(void* pointer) { return cudaFree(pointer); }

int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int, Comm*) {
  double factor = type == F64    ? *(double*)scalar
                  : type == F32  ? *(float*)scalar
                  : type == F16  ? (float)*(c10::Half*)scalar
                  : type == BF16 ? (float)*(c10::BFloat16*)scalar
                                 : 0;
  own_ops.push_back({factor});
  *op = FIRST_OWN_OP + own_ops.size() - 1;
  return SUCCESS;
}

int ncclRedOpDestroy(int, Comm*) { return SUCCESS; }

int ncclAllReduce(const char* from, char* to, size_t count, int type, int op, Comm* comm, void*) {
  auto look = [&](size_t at, size_t piece) { reduce_slots(comm, to + at, piece, type, op); };
  return result_of(comm->show(from, count * SIZES[type], look));
}

int ncclReduce(const char* from, char* to, size_t count, int type, int op, int root, Comm* comm, void*) {
  auto look = [&](size_t at, size_t piece) {
    if (comm->rank == root) reduce_slots(comm, to + at, piece, type, op);
  };
  return result_of(comm->show(from, count * SIZES[type], look));
}

int ncclBroadcast(const char* from, char* to, size_t count, int type, int root, Comm* comm, void*) {
  auto look = [&](size_t at, size_t piece) { memcpy(to + at, comm->slot(root), piece); };
  return result_of(comm->show(comm->rank == root ? from : nullptr, count * SIZES[type], look));
}

int ncclBcast(char* data, size_t count, int type, int root, Comm* comm, void* stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}

int ncclAllGather(const char* from, char* to, size_t count, int type, Comm* comm, void*) {
  size_t bytes = count * SIZES[type];
  auto look = [&](size_t at, size_t piece) {
    for (int i = 0; i < comm->size; i++) memcpy(to + i * bytes + at, comm->slot(i), piece);
  };
  return result_of(comm->show(from, bytes, look));
}

int ncclReduceScatter(const char* from, char* to, size_t count, int type, int op, Comm* comm, void*) {
  size_t bytes = count * SIZES[type];
  std::vector<char> mine(bytes);  // `to` may be a part of `from`
  for (int part = 0; part < comm->size; part++) {
    auto look = [&](size_t at, size_t piece) {
      if (part == comm->rank) reduce_slots(comm, mine.data() + at, piece, type, op);
    };
    if (!comm->show(from + part * bytes, bytes, look)) return SYSTEM_ERROR;
  }
  memcpy(to, mine.data(), bytes);
  return SUCCESS;
}

int ncclGroupStart() {
  groups++;
  return SUCCESS;
}

int ncclGroupEnd() {
  groups--;
  return move_messages();
}

int ncclSend(const char* data, size_t count, int type, int peer, Comm* comm, void*) {
  messages.push_back({comm, (char*)data, count * SIZES[type], peer, true});
  return move_messages();
}

int ncclRecv(char* data, size_t count, int type, int peer, Comm* comm, void*) {
  messages.push_back({comm, data, count * SIZES[type], peer, false});
  return move_messages();
}

int ncclAlltoAll(const char* from, char* to, size_t count, int type, Comm* comm, void* stream) {
  size_t bytes = count * SIZES[type];
  ncclGroupStart();
  for (int i = 0; i < comm->size; i++) {
    ncclSend(from + i * bytes, count, type, i, comm, stream);
    ncclRecv(to + i * bytes, count, type, i, comm, stream);
  }
  return ncclGroupEnd();
}

int ncclGather(const char* from, char* to, size_t count, int type, int root, Comm* comm, void* stream) {
  ncclGroupStart();
  ncclSend(from, count, type, root, comm, stream);
  for (int i = 0; i < comm->size && comm->rank == root; i++) ncclRecv(to + i * count * SIZES[type], count, type, i, comm, stream);
  return ncclGroupEnd();
}
}
