// An NCCL for simulated GPUs: the processes of one machine meet in a file of shared memory.
//
// Declared after NVIDIA's public nccl.h.  Each call is a list of messages from rank to rank, and what is computed when
// they are there.  This is done in the background: after what its stream and its communicator have to do, and later
// with SIM_NCCL_DELAY.  A rank that waits for longer than two minutes says so and fails.  Like the real one, it refuses
// one GPU for two ranks.
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
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

enum Result { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum Op { SUM = 0, MAX = 2, MIN = 3, AVG = 4 };
enum Type { I8 = 0, U8 = 1, I32 = 2, I64 = 4, F16 = 6, F32 = 7, F64 = 8, BF16 = 9 };
const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

struct Work;
extern "C" {  // cuda.cpp
int sim_gpu_number();  // the current device's place in the machine
void sim_launch(void* stream, const char* name, std::shared_ptr<Work>* before, std::function<void()> work);
void sim_wait(std::shared_ptr<Work>* work);
}

struct UniqueId {
  char bytes[128];
};

namespace {

constexpr size_t BOX = 1 << 18;   // bytes that are on their way from one rank to another
constexpr double PATIENCE = 120;  // seconds

thread_local std::string last_error;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Box {
  std::atomic<bool> is_full;
  char bytes[BOX];
};

struct Shared {  // all zeros at first
  std::atomic<int> joined;
  Box boxes[];  // one for each pair of ranks
};

struct Message {
  int peer;
  bool is_out;  // to the peer, or from it
  char* data;
  size_t left;  // bytes
};

struct Comm {
  std::string name;
  int rank, size;
  Shared* shared = nullptr;
  size_t bytes = 0;
  int splits = 0;
  std::shared_ptr<Work> last;
  std::atomic<int> error = SUCCESS;
  std::atomic<bool> is_aborted = false;

  bool wait_until(const std::function<bool()>& done, const char* what) {
    double end = now() + PATIENCE;
    for (int turn = 0; !done(); turn++) {
      if (is_aborted) return false;
      if (now() > end) {
        last_error = std::string("simulated NCCL: rank ") + std::to_string(rank) + " waited in vain " + what;
        fprintf(stderr, "%s\n", last_error.c_str());
        return false;
      }
      turn < 1000 ? (void)sched_yield() : (void)usleep(200);
    }
    return true;
  }

  bool join() {
    bytes = sizeof(Shared) + size * size * sizeof(Box);
    std::string path = "/dev/shm/" + name;
    int file = open(path.c_str(), O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, bytes)) return false;
    shared = (Shared*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (shared == MAP_FAILED) return false;
    shared->joined++;
    bool all = wait_until([&] { return shared->joined == size; }, "for the other ranks to join");
    if (rank == 0) unlink(path.c_str());
    return all;
  }

  void move(Message& message) {  // the next piece of it, if the box is ready for it
    int from = message.is_out ? rank : message.peer, to = message.is_out ? message.peer : rank;
    Box& box = shared->boxes[from * size + to];
    if (box.is_full == message.is_out) return;
    size_t piece = std::min(BOX, message.left);
    message.is_out ? memcpy(box.bytes, message.data, piece) : memcpy(message.data, box.bytes, piece);
    box.is_full = message.is_out;
    message.data += piece;
    message.left -= piece;
  }

  bool exchange(std::vector<Message> messages) {
    auto all_done = [&] {
      std::set<std::pair<int, bool>> seen;  // messages to one peer keep their order, and so do those from it
      for (auto& message : messages)
        if (message.left && seen.insert({message.peer, message.is_out}).second) move(message);
      std::erase_if(messages, [](auto& message) { return message.left == 0; });
      return messages.empty();
    };
    return wait_until(all_done, "for another rank's message");
  }

  // With each rank: `bytes` from the place that is meant for it, and as many to the place that is meant for its own.
  std::vector<Message> with_all(const void* from, size_t from_step, void* to, size_t to_step, size_t bytes) {
    std::vector<Message> messages;
    for (int peer = 0; peer < size; peer++) {
      messages.push_back({peer, true, (char*)from + peer * from_step, bytes});
      messages.push_back({peer, false, (char*)to + peer * to_step, bytes});
    }
    return messages;
  }
};

// ------------------------------------------------------------------------------------------------ what is done later

struct Call {
  Comm* comm;
  void* stream;
  const char* name;
  std::vector<Message> messages;
  std::function<void()> finish = [] {};
};

thread_local int depth = 0;            // of groups: their calls begin together, at the end of the outermost
thread_local std::vector<Call> calls;  // one for each communicator

double delay() {  // SIM_NCCL_DELAY=0,0.05: seconds for each GPU of the machine; the last number is also the next GPUs'
  const char* text = getenv("SIM_NCCL_DELAY");
  std::stringstream numbers(text ? text : "");
  std::string number = "0";
  for (int gpu = 0; gpu <= sim_gpu_number(); gpu++) std::getline(numbers, number, ',');
  return atof(number.c_str());
}

int launch_calls() {
  for (auto& call : calls) {
    double seconds = delay();
    sim_launch(call.stream, call.name, &call.comm->last, [=] {
      Comm* comm = call.comm;
      double begin = now() + seconds;
      auto may_begin = [&] { return now() >= begin; };
      if (comm->wait_until(may_begin, "for its delay") && comm->exchange(call.messages)) return call.finish();
      if (!comm->is_aborted) comm->error = SYSTEM_ERROR;
    });
  }
  calls.clear();
  return SUCCESS;
}

int add(Call call) {
  auto earlier = std::find_if(calls.begin(), calls.end(), [&](auto& other) { return other.comm == call.comm; });
  if (earlier == calls.end()) {
    calls.push_back(call);
  } else {
    earlier->messages.insert(earlier->messages.end(), call.messages.begin(), call.messages.end());
    earlier->finish = [first = earlier->finish, second = call.finish] { first(), second(); };
  }
  return depth ? SUCCESS : launch_calls();
}

template <class T, class Compute>
void reduce_as(const std::vector<char>& parts, int size, char* to, int op) {
  size_t count = parts.size() / size / sizeof(T);
  const T* values = (const T*)parts.data();
  for (size_t i = 0; i < count; i++) {
    Compute result = (Compute)values[i];
    for (int rank = 1; rank < size; rank++) {
      Compute value = (Compute)values[rank * count + i];
      result = op == MAX ? std::max(result, value) : op == MIN ? std::min(result, value) : Compute(result + value);
    }
    ((T*)to)[i] = (T)(op == AVG ? result / size : result);
  }
}

// `bytes` of each rank to each, then their reduction into `to`.
int reduce(Comm* comm, void* stream, const char* name, const char* from, size_t step, char* to, size_t bytes, int type,
           int op) {
  auto reduce_type = type == I8     ? reduce_as<int8_t, int8_t>
                     : type == U8   ? reduce_as<uint8_t, uint8_t>
                     : type == I32  ? reduce_as<int32_t, int32_t>
                     : type == I64  ? reduce_as<int64_t, int64_t>
                     : type == F16  ? reduce_as<c10::Half, float>
                     : type == BF16 ? reduce_as<c10::BFloat16, float>
                     : type == F32  ? reduce_as<float, float>
                     : type == F64  ? reduce_as<double, double>
                                    : nullptr;
  if (!reduce_type || !(op == SUM || op == MAX || op == MIN || op == AVG)) {
    last_error = "simulated NCCL: no reduction " + std::to_string(op) + " of type " + std::to_string(type);
    return INVALID_ARGUMENT;
  }
  auto parts = std::make_shared<std::vector<char>>(comm->size * bytes);
  auto messages = comm->with_all(from, step, parts->data(), bytes, bytes);
  return add({comm, stream, name, messages, [=] { reduce_type(*parts, comm->size, to, op); }});
}

}  // namespace

extern "C" {

const char* ncclGetErrorString(int code) {
  return code == SUCCESS ? "no error" : code == INVALID_USAGE ? "invalid usage" : "simulated NCCL: an error";
}

const char* ncclGetLastError(Comm*) { return last_error.c_str(); }

// ------------------------------------------------------------------------------------------------------ communicators

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
  std::vector<int> gpus(size);
  int mine = sim_gpu_number();
  if (!comm->join() || !comm->exchange(comm->with_all(&mine, 0, gpus.data(), sizeof mine, sizeof mine)))
    return SYSTEM_ERROR;
  for (int i = 0; i < size; i++)
    if (i != rank && gpus[i] == mine) {
      last_error = "Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " + std::to_string(i) +
                   " both on the same simulated GPU";
      return INVALID_USAGE;
    }
  *made = comm;
  return SUCCESS;
}

int ncclCommSplit(Comm* comm, int color, int key, Comm** made, void*) {  // a new one of the ranks with my color
  struct Place {
    int color, key, rank;
  };
  std::vector<Place> places(comm->size);
  Place mine{color, key, comm->rank};
  sim_wait(&comm->last);
  if (!comm->exchange(comm->with_all(&mine, 0, places.data(), sizeof mine, sizeof mine))) return SYSTEM_ERROR;
  std::string name = comm->name + "-" + std::to_string(comm->splits++) + "-" + std::to_string(color);
  *made = nullptr;
  if (color < 0) return SUCCESS;  // I am in none
  int rank = 0, size = 0;  // there, in the order of the keys
  for (auto& place : places) {
    if (place.color != color) continue;
    size++;
    if (std::pair(place.key, place.rank) < std::pair(key, comm->rank)) rank++;
  }
  *made = new Comm{name, rank, size};
  return (*made)->join() ? SUCCESS : SYSTEM_ERROR;
}

int ncclCommFinalize(Comm* comm) {  // torch 2.14 calls it
  sim_wait(&comm->last);
  return SUCCESS;
}

int ncclCommAbort(Comm* comm) {  // its memory stays: threads may look at it; torch calls it again with none
  if (comm) comm->is_aborted = true;
  return SUCCESS;
}

int ncclCommDestroy(Comm* comm) {
  sim_wait(&comm->last);
  munmap(comm->shared, comm->bytes);
  delete comm;
  return SUCCESS;
}

int ncclCommGetAsyncError(Comm* comm, int* error) {
  *error = comm->error;
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

// -------------------------------------------------------------------------------------------------------------- calls

int ncclGroupStart() {
  depth++;
  return SUCCESS;
}

int ncclGroupEnd() { return --depth ? SUCCESS : launch_calls(); }

int ncclSend(const char* from, size_t count, int type, int peer, Comm* comm, void* stream) {
  return add({comm, stream, "ncclDevKernel_SendRecv", {{peer, true, (char*)from, count * SIZES[type]}}});
}

int ncclRecv(char* to, size_t count, int type, int peer, Comm* comm, void* stream) {
  return add({comm, stream, "ncclDevKernel_SendRecv", {{peer, false, to, count * SIZES[type]}}});
}

int ncclBroadcast(const char* from, char* to, size_t count, int type, int root, Comm* comm, void* stream) {
  std::vector<Message> messages{{root, false, to, count * SIZES[type]}};
  for (int peer = 0; comm->rank == root && peer < comm->size; peer++)
    messages.push_back({peer, true, (char*)from, count * SIZES[type]});
  return add({comm, stream, "ncclDevKernel_Broadcast", messages});
}

int ncclBcast(char* data, size_t count, int type, int root, Comm* comm, void* stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}

int ncclAllGather(const char* from, char* to, size_t count, int type, Comm* comm, void* stream) {
  size_t bytes = count * SIZES[type];
  return add({comm, stream, "ncclDevKernel_AllGather", comm->with_all(from, 0, to, bytes, bytes)});
}

int ncclAlltoAll(const char* from, char* to, size_t count, int type, Comm* comm, void* stream) {
  size_t bytes = count * SIZES[type];
  return add({comm, stream, "ncclDevKernel_AlltoAll", comm->with_all(from, bytes, to, bytes, bytes)});
}

int ncclAllReduce(const char* from, char* to, size_t count, int type, int op, Comm* comm, void* stream) {
  return reduce(comm, stream, "ncclDevKernel_AllReduce", from, 0, to, count * SIZES[type], type, op);
}

int ncclReduceScatter(const char* from, char* to, size_t count, int type, int op, Comm* comm, void* stream) {
  size_t bytes = count * SIZES[type];
  return reduce(comm, stream, "ncclDevKernel_ReduceScatter", from, bytes, to, bytes, type, op);
}
}
