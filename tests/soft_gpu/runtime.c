/* CUDA's runtime and the parts of its driver that torch calls, with host memory as device memory.
   What a stream is given is done when the call returns. No kernel runs here: operators.cpp computes
   on the CPU, and a launch is an error that names its kernel. */
#define _GNU_SOURCE
#include "staged.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static void trace(const char *format, ...) { /* a line of SOFT_GPU_TRACE, from any process */
  const char *path = getenv("SOFT_GPU_TRACE");
  const int file = path ? open(path, O_WRONLY | O_APPEND | O_CREAT, 0666) : -1;
  if (file < 0) return;
  char text[200];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  dprintf(file, "%d %s\n", getpid(), text);
  close(file);
}

/* ---- errors ---- */

static __thread cudaError_t last_error;
static __thread char unreplaced[400]; /* says which kernel was launched */
static _Atomic int sticky_error;      /* as of an illegal access: every later call has it too */

static cudaError_t set_error(cudaError_t error) {
  if (error) last_error = error;
  return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }
cudaError_t cudaGetLastError(void) {
  const cudaError_t error = last_error;
  last_error = sticky_error;
  return error;
}

#define ERRORS(X)                                                                                  \
  X(cudaSuccess, "no error")                                                                       \
  X(cudaErrorInvalidValue, "invalid argument")                                                     \
  X(cudaErrorMemoryAllocation, "out of memory")                                                    \
  X(cudaErrorInitializationError, "initialization error")                                          \
  X(cudaErrorDevicesUnavailable, "CUDA-capable device(s) is/are busy or unavailable")              \
  X(cudaErrorNoDevice, "no CUDA-capable device is detected")                                       \
  X(cudaErrorInvalidDevice, "invalid device ordinal")                                              \
  X(cudaErrorNoKernelImageForDevice, *unreplaced ? unreplaced : "no kernel image")                 \
  X(cudaErrorSharedObjectInitFailed, "the operators of soft GPUs can't be loaded")                 \
  X(cudaErrorNotReady, "device not ready")                                                         \
  X(cudaErrorIllegalAddress, "an illegal memory access was encountered")                           \
  X(cudaErrorNotSupported, "operation not supported")

const char *cudaGetErrorName(cudaError_t error) {
#define NAME(code, text) if (error == code) return #code;
  ERRORS(NAME)
  return "cudaErrorUnknown";
}
const char *cudaGetErrorString(cudaError_t error) {
#define TEXT(code, text) if (error == code) return text;
  ERRORS(TEXT)
  return "unknown error";
}

/* ---- the driver: started by the first call that needs it, for this process alone ---- */

static struct {
  _Atomic pid_t owner; /* the process that has started it; a fork of that can't use it */
  int num_visible, visible[MAX_CARDS]; /* the cards that CUDA_VISIBLE_DEVICES shows */
  size_t memory;
  long fail_at;
  bool poison, late;
} driver;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t operators_once = PTHREAD_ONCE_INIT;
static bool has_operators;
static __thread int current_device;
static bool has_context[MAX_CARDS];
static struct { _Atomic long operators, waits, to_device, to_host, within, launches, races; } counts;

static void find_visible(void) {
  const int num_cards = staged_count();
  const char *listed = getenv("CUDA_VISIBLE_DEVICES");
  driver.num_visible = 0;
  for (int card = 0; card < num_cards && !listed; card++)
    driver.visible[driver.num_visible++] = card;
  char *copy = strdup(listed ? listed : ""), *rest;
  for (char *word = strtok_r(copy, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
    int card = -1;
    if (strncmp(word, "GPU-", 4) == 0)
      for (int each = 0; each < num_cards; each++) {
        char uuid[64];
        card_uuid(each, uuid, sizeof uuid);
        if (strncmp(uuid, word, strlen(word)) == 0) card = each;
      }
    else card = atoi(word);
    if (card < 0 || card >= num_cards || driver.num_visible == MAX_CARDS) break; /* as CUDA does */
    driver.visible[driver.num_visible++] = card;
  }
  free(copy);
}

static void load_operators(void) { /* from the folder of this library */
  Dl_info own;
  char path[4096];
  dladdr((void *)load_operators, &own);
  snprintf(path, sizeof path, "%.*s/operators.so",
           (int)(strrchr(own.dli_fname, '/') - own.dli_fname), own.dli_fname);
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  void (*install)(void) = library ? (void (*)(void))dlsym(library, "soft_gpu_install") : NULL;
  if (!install) fprintf(stderr, "soft GPU: %s\n", dlerror());
  else install(), has_operators = true;
}
void soft_gpu_load(void) { pthread_once(&operators_once, load_operators); }

static void join_cards(void); /* by their memory, below */

static cudaError_t use_driver(void) {
  soft_gpu_load();
  if (!has_operators) return set_error(cudaErrorSharedObjectInitFailed);
  if (!driver.owner) {
    pthread_mutex_lock(&lock);
    if (!driver.owner) {
      find_visible();
      driver.memory = card_memory();
      driver.fail_at = (long)staged_number("SOFT_GPU_FAIL_AT", -1);
      driver.poison = staged_number("SOFT_GPU_POISON", 0);
      driver.late = staged_number("SOFT_GPU_LATE", 0);
      join_cards();
      driver.owner = getpid();
      trace("driver");
    }
    pthread_mutex_unlock(&lock);
  }
  if (driver.owner != getpid()) {
    trace("forked");
    return set_error(cudaErrorInitializationError);
  }
  return set_error(driver.num_visible ? (cudaError_t)sticky_error : cudaErrorNoDevice);
}

static cudaError_t take_memory(int device, size_t bytes);

static cudaError_t use_context(int device) {
  cudaError_t error = use_driver();
  if (error) return error;
  if (device < 0 || device >= driver.num_visible) return set_error(cudaErrorInvalidDevice);
  if (has_context[device]) return cudaSuccess;
  const int card = driver.visible[device];
  if (is_staged("SOFT_GPU_DEAD", card)) return set_error(cudaErrorDevicesUnavailable);
  pthread_mutex_lock(&lock);
  if (!has_context[device]) {
    error = take_memory(device, (size_t)staged_number("SOFT_GPU_CONTEXT", 0));
    if (!error) trace("context %d", card);
    has_context[device] = !error;
  }
  pthread_mutex_unlock(&lock);
  return set_error(error);
}

/* Called by operators.cpp before each operator. */
cudaError_t soft_gpu_operator(const char *name) {
  const cudaError_t error = use_context(current_device);
  if (!error && ++counts.operators == driver.fail_at) {
    trace("fault in %s", name);
    sticky_error = cudaErrorIllegalAddress;
  }
  return set_error(error ? error : (cudaError_t)sticky_error);
}

int soft_gpu_card(void) { /* by its number in NVML; -1: none */
  return use_context(current_device) ? -1 : driver.visible[current_device];
}

/* ---- devices ---- */

cudaError_t cudaGetDeviceCount(int *count) {
  const cudaError_t error = use_driver();
  *count = error ? 0 : driver.num_visible;
  return error;
}
cudaError_t cudaGetDevice(int *device) { *device = current_device; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  const cudaError_t error = use_context(device);
  if (!error) current_device = device;
  return error;
}
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", driver.visible[device]);
  return use_driver();
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
  const cudaError_t error = use_driver();
  if (error) return error;
  if (device < 0 || device >= driver.num_visible) return set_error(cudaErrorInvalidDevice);
  const int capability = (int)(10 * staged_number("SOFT_GPU_CAPABILITY", 8.0) + 0.5);
  *found = (struct cudaDeviceProp){
      .name = "Soft GPU", .totalGlobalMem = driver.memory,
      .pciBusID = driver.visible[device], .uuid.bytes[3] = (char)(driver.visible[device] + 1),
      .major = capability / 10, .minor = capability % 10,
      .multiProcessorCount = 108, .warpSize = 32, .l2CacheSize = 40 << 20,
      .maxThreadsPerBlock = 1024, .maxThreadsPerMultiProcessor = 2048,
      .maxThreadsDim = {1024, 1024, 64}, .maxGridSize = {2147483647, 65535, 65535},
      .maxBlocksPerMultiProcessor = 32, .regsPerBlock = 65536, .sharedMemPerBlock = 49152,
      .sharedMemPerMultiprocessor = 167936, .sharedMemPerBlockOptin = 166912};
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  struct cudaDeviceProp found;
  const cudaError_t error = cudaGetDeviceProperties(&found, device);
  *value = error                                              ? 0
           : attribute == cudaDevAttrComputeCapabilityMajor   ? found.major
           : attribute == cudaDevAttrComputeCapabilityMinor   ? found.minor
           : attribute == cudaDevAttrWarpSize                 ? found.warpSize
           : attribute == cudaDevAttrMultiProcessorCount      ? found.multiProcessorCount
           : attribute == cudaDevAttrMaxThreadsPerBlock       ? found.maxThreadsPerBlock
           : attribute == cudaDevAttrMaxSharedMemoryPerBlock  ? (int)found.sharedMemPerBlock
                                                              : 0;
  return error;
}

/* ---- memory: that of a card is shared by all processes with the same SOFT_GPU_LEDGER ---- */

enum { MAX_PROCESSES = 256 };
static struct { _Atomic size_t used[MAX_CARDS]; } (*ledger)[MAX_PROCESSES];
static int ledger_file, own_row;

static bool row_is_alive(int row) { /* its process holds a lock, which ends with it */
  struct flock held = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = row, .l_len = 1};
  return row == own_row || (fcntl(ledger_file, F_GETLK, &held) == 0 && held.l_type != F_UNLCK);
}

static void join_cards(void) {
  const char *path = getenv("SOFT_GPU_LEDGER");
  ledger_file = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666) : memfd_create("ledger", 0);
  if (ledger_file < 0 || ftruncate(ledger_file, sizeof *ledger)) abort();
  ledger = mmap(NULL, sizeof *ledger, PROT_READ | PROT_WRITE, MAP_SHARED, ledger_file, 0);
  if (ledger == MAP_FAILED) abort();
  for (own_row = 0; own_row < MAX_PROCESSES; own_row++) {
    struct flock mine = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = own_row, .l_len = 1};
    if (fcntl(ledger_file, F_SETLK, &mine) == 0) break;
  }
  if (own_row == MAX_PROCESSES) abort();
  memset((*ledger) + own_row, 0, sizeof **ledger);
}

static size_t memory_left(int device) {
  const int card = driver.visible[device];
  size_t used = is_staged("SOFT_GPU_FULL", card) ? driver.memory : 0;
  for (int row = 0; row < MAX_PROCESSES; row++)
    if ((*ledger)[row].used[card] && row_is_alive(row)) used += (*ledger)[row].used[card];
  return used < driver.memory ? driver.memory - used : 0;
}

static cudaError_t take_memory(int device, size_t bytes) { /* under the lock */
  if (bytes > memory_left(device)) return cudaErrorMemoryAllocation;
  (*ledger)[own_row].used[driver.visible[device]] += bytes;
  return cudaSuccess;
}

struct block { char *start; size_t bytes; int type, device; struct block *next; };
static struct block *blocks;

static bool holds(const struct block *block, const void *at) {
  return (char *)at >= block->start && (char *)at < block->start + block->bytes;
}

static void add_block(void *start, size_t bytes, int type) {
  struct block *block = malloc(sizeof *block);
  pthread_mutex_lock(&lock);
  *block = (struct block){start, bytes, type, current_device, blocks};
  blocks = block;
  pthread_mutex_unlock(&lock);
}

static cudaError_t allocate(void **start, size_t bytes, int type) {
  cudaError_t error = use_context(current_device);
  if (error) return error;
  bytes += !bytes;
  if (type == cudaMemoryTypeDevice) {
    pthread_mutex_lock(&lock);
    error = take_memory(current_device, bytes);
    pthread_mutex_unlock(&lock);
    if (error) return set_error(error);
  }
  *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*start == MAP_FAILED) abort(); /* of this machine's memory, not of the card's */
  if (type == cudaMemoryTypeDevice && driver.poison) memset(*start, 0xff, bytes); /* NaN */
  add_block(*start, bytes, type);
  return cudaSuccess;
}

static cudaError_t remove_block(void *start, bool is_owned) {
  const cudaError_t error = use_driver();
  if (error || !start) return error;
  pthread_mutex_lock(&lock);
  struct block **at = &blocks, *block;
  while (*at && (*at)->start != start) at = &(*at)->next;
  if ((block = *at)) {
    *at = block->next;
    if (block->type == cudaMemoryTypeDevice)
      (*ledger)[own_row].used[driver.visible[block->device]] -= block->bytes;
    if (is_owned) munmap(block->start, block->bytes);
    free(block);
  }
  pthread_mutex_unlock(&lock);
  return set_error(block ? cudaSuccess : cudaErrorInvalidValue);
}

/* ---- copies that come late: with SOFT_GPU_LATE, one between pinned and device memory is under way
   until the host waits for its stream, or for an event that was recorded behind it. What goes to
   the host is NaN until then; what comes from the host must then be as it was. ---- */

enum { MAX_COPYING = 32 }; /* streams that have had such a copy; others have no number */
struct progress { long of[MAX_COPYING]; }; /* by stream: copies up to this one lie behind */
struct stream { int number; struct progress progress; };
struct event { struct timespec recorded; bool was_asked; struct progress progress; };
struct copy {
  char *host, *data; /* data: on its way to the host */
  size_t bytes;
  uint64_t checksum;
  int stream;
  long index;
  struct copy *next;
};
static struct copy *copies;
static long num_copies;
static _Atomic int num_copying;
static struct stream default_streams[MAX_CARDS];
static const struct progress everything = {.of = {[0 ... MAX_COPYING - 1] = __LONG_MAX__}};

static struct stream *stream_of(cudaStream_t handle) {
  return handle ? (struct stream *)handle : &default_streams[current_device];
}

static uint64_t checksum_of(const char *at, size_t bytes) { /* FNV-1a, of words */
  uint64_t sum = 14695981039346656037ul, word;
  for (; bytes; at += sizeof word, bytes -= sizeof word) {
    word = 0;
    memcpy(&word, at, bytes < sizeof word ? bytes : sizeof word);
    sum = (sum ^ word) * 1099511628211ul;
    if (bytes < sizeof word) break;
  }
  return sum;
}

static void finish(struct copy **at) { /* under the lock */
  struct copy *copy = *at;
  if (copy->data) memcpy(copy->host, copy->data, copy->bytes);
  else if (checksum_of(copy->host, copy->bytes) != copy->checksum) {
    counts.races++;
    fprintf(stderr, "soft GPU: %zu pinned bytes at %p were overwritten while they were copied\n",
            copy->bytes, (void *)copy->host);
  }
  *at = copy->next;
  free(copy->data);
  free(copy);
}

static void wait_for(const struct progress *progress) {
  if (!driver.late) return;
  pthread_mutex_lock(&lock);
  for (struct copy **at = &copies; *at;)
    if ((*at)->index <= progress->of[(*at)->stream]) finish(at);
    else at = &(*at)->next;
  pthread_mutex_unlock(&lock);
}

static void begin_late_copy(char *host, size_t bytes, struct stream *stream, bool to_host) {
  struct copy *copy = calloc(1, sizeof *copy);
  pthread_mutex_lock(&lock);
  if (!stream->number) stream->number = ++num_copying;
  if (stream->number >= MAX_COPYING) abort();
  *copy = (struct copy){host, NULL, bytes, 0, stream->number, ++num_copies, copies};
  stream->progress.of[stream->number] = copy->index;
  if (to_host) {
    copy->data = memcpy(malloc(bytes), host, bytes);
    memset(host, 0xff, bytes);
  } else copy->checksum = checksum_of(host, bytes);
  copies = copy;
  pthread_mutex_unlock(&lock);
}

static bool is_pinned(const char *host) {
  pthread_mutex_lock(&lock);
  const struct block *block = blocks;
  while (block && !(block->type == cudaMemoryTypeHost && holds(block, host))) block = block->next;
  pthread_mutex_unlock(&lock);
  return block;
}

static void finish_overlapping(const char *host, size_t bytes) { /* a stream keeps its order */
  pthread_mutex_lock(&lock);
  for (struct copy **at = &copies; *at;)
    if ((*at)->host < host + bytes && host < (*at)->host + (*at)->bytes) finish(at);
    else at = &(*at)->next;
  pthread_mutex_unlock(&lock);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  const cudaError_t error = use_context(current_device);
  if (error) return error;
  const bool to_host = kind == cudaMemcpyDeviceToHost, to_device = kind == cudaMemcpyHostToDevice;
  char *host = to_host ? to : (char *)from;
  const bool is_late = driver.late && (to_host || to_device) && bytes && is_pinned(host);
  ++*(to_host ? &counts.to_host : to_device ? &counts.to_device : &counts.within);
  if (is_late) finish_overlapping(host, bytes);
  memmove(to, from, bytes);
  if (is_late) begin_late_copy(host, bytes, stream_of(stream), to_host);
  else if (to_host) wait_for(&stream_of(stream)->progress); /* pageable: the call itself waits */
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, NULL);
  return error ? error : cudaStreamSynchronize(NULL);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  for (size_t row = 0; row < height && !error; row++)
    error = cudaMemcpyAsync((char *)to + row * to_pitch, (const char *)from + row * from_pitch,
                            width, kind, stream);
  return error;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
  const cudaError_t error = use_context(current_device);
  if (!error) memset(to, value, bytes);
  return error;
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, NULL);
}

cudaError_t cudaMalloc(void **start, size_t bytes) {
  return allocate(start, bytes, cudaMemoryTypeDevice);
}
cudaError_t cudaHostAlloc(void **start, size_t bytes, unsigned flags) {
  return allocate(start, bytes, cudaMemoryTypeHost);
}
cudaError_t cudaHostRegister(void *start, size_t bytes, unsigned flags) {
  const cudaError_t error = use_context(current_device);
  if (!error) add_block(start, bytes, cudaMemoryTypeHost);
  return error;
}
cudaError_t cudaFree(void *start) { return remove_block(start, true); }
cudaError_t cudaFreeHost(void *start) { wait_for(&everything); return remove_block(start, true); }
cudaError_t cudaHostUnregister(void *start) {
  wait_for(&everything);
  return remove_block(start, false);
}
cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
  const cudaError_t error = use_context(current_device);
  *left = error ? 0 : memory_left(current_device);
  *total = driver.memory;
  return error;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *at) {
  *found = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = -2};
  pthread_mutex_lock(&lock);
  for (const struct block *block = blocks; block; block = block->next)
    if (holds(block, at)) {
      found->type = block->type, found->device = block->device;
      found->devicePointer = found->hostPointer = (void *)at;
    }
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

/* ---- streams and events ---- */

static cudaError_t create(void **handle, size_t bytes) {
  const cudaError_t error = use_context(current_device);
  *handle = error ? NULL : calloc(1, bytes);
  return error;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  return create((void **)stream, sizeof(struct stream));
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  return create((void **)stream, sizeof(struct stream));
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) {
  return create((void **)stream, sizeof(struct stream));
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { free(stream); return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const cudaError_t error = use_context(current_device);
  counts.waits++;
  wait_for(&stream_of(stream)->progress);
  return error;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  wait_for(&stream_of(stream)->progress); /* the answer is that all is done */
  return use_context(current_device);
}
cudaError_t cudaDeviceSynchronize(void) {
  const cudaError_t error = use_context(current_device);
  counts.waits++;
  wait_for(&everything);
  return error;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  wait_for(&stream_of(stream)->progress);
  function(data);
  return use_driver();
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data,
                                  unsigned flags) {
  wait_for(&stream_of(stream)->progress);
  function(stream, cudaSuccess, data);
  return use_driver();
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
  struct stream *stream = stream_of(handle);
  pthread_mutex_lock(&lock);
  for (int each = 0; each < MAX_COPYING; each++)
    if (stream->progress.of[each] < ((struct event *)event)->progress.of[each])
      stream->progress.of[each] = ((struct event *)event)->progress.of[each];
  pthread_mutex_unlock(&lock);
  return use_driver();
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  return create((void **)event, sizeof(struct event));
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  struct event *event = (struct event *)handle;
  clock_gettime(CLOCK_MONOTONIC, &event->recorded);
  event->progress = stream_of(stream)->progress;
  event->was_asked = false;
  return use_driver();
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  struct event *event = (struct event *)handle;
  const bool was_asked = event->was_asked;
  event->was_asked = true;
  if (driver.late && !was_asked) return set_error(cudaErrorNotReady);
  wait_for(&event->progress);
  return use_driver();
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  counts.waits++;
  wait_for(&((struct event *)event)->progress);
  return use_driver();
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end) {
  const struct timespec a = ((struct event *)begin)->recorded, b = ((struct event *)end)->recorded;
  *ms = (float)((b.tv_sec - a.tv_sec) * 1e3 + (b.tv_nsec - a.tv_nsec) * 1e-6);
  return use_driver();
}

/* ---- CUDA graphs: nothing is captured ---- */

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  return cudaSuccess;
}
/* The headers of CUDA 12 and 13 declare these differently, so the linker alone sees their names. */
int capture_info(void *stream, int *status) __asm__("cudaStreamGetCaptureInfo");
int capture_info_v2(void *stream, int *status) __asm__("cudaStreamGetCaptureInfo_v2");
int capture_info_v3(void *stream, int *status) __asm__("cudaStreamGetCaptureInfo_v3");
int capture_info(void *stream, int *status) { return *status = 0; }
int capture_info_v2(void *stream, int *status) { return *status = 0; }
int capture_info_v3(void *stream, int *status) { return *status = 0; }

/* ---- kernels ---- */

static struct kernel { const void *function; const char *name; } *kernels;
static size_t num_kernels;

void __cudaRegisterFunction(void **module, const char *function, char *device_function,
                            const char *name, int threads, void *a, void *b, void *c, void *d,
                            int *e) {
  if (num_kernels % 4096 == 0)
    kernels = realloc(kernels, (num_kernels + 4096) * sizeof *kernels);
  kernels[num_kernels++] = (struct kernel){function, name};
}
static cudaError_t refuse_launch(const void *function) {
  const char *name = "of a library";
  for (size_t each = 0; each < num_kernels; each++)
    if (kernels[each].function == function) name = kernels[each].name;
  snprintf(unreplaced, sizeof unreplaced,
           "soft GPU: a CUDA kernel was launched, which has no numbers here: %s", name);
  counts.launches++;
  return set_error(cudaErrorNoKernelImageForDevice);
}
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                             size_t memory, cudaStream_t stream) {
  return refuse_launch(function);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                               size_t memory, cudaStream_t stream) {
  return refuse_launch(kernel);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function,
                                void **arguments) {
  return refuse_launch(function);
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
void **__cudaRegisterFatBinary(void *binary) { return calloc(1, sizeof(void *)); }
void __cudaRegisterFatBinaryEnd(void **module) {}
void __cudaUnregisterFatBinary(void **module) { free(module); }
char __cudaInitModule(void **module) { return 1; }
void __cudaRegisterVar(void) {}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t memory, void *stream) {
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *memory, void *stream) {
  *grid = *block = (dim3){1, 1, 1}, *memory = 0, *(void **)stream = NULL;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *function, int block_size, size_t memory, unsigned flags) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
  *found = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32};
  found->binaryVersion = found->ptxVersion = 80;
  return cudaSuccess;
}

/* ---- the driver's own interface, as far as torch uses it beside the runtime ---- */

static int not_supported(void) { return cudaErrorNotSupported; }
static int find_entry(const char *name, void **entry, int *status) {
  *entry = dlsym(RTLD_DEFAULT, name);
  if (!*entry) *entry = (void *)not_supported;
  if (status) *status = 0;
  return 0;
}
int entry_point(const char *name, void **entry, unsigned long long flags, int *status)
    __asm__("cudaGetDriverEntryPoint");
int entry_point_by_version(const char *name, void **entry, unsigned version,
                           unsigned long long flags, int *status)
    __asm__("cudaGetDriverEntryPointByVersion");
int entry_point(const char *name, void **entry, unsigned long long flags, int *status) {
  return find_entry(name, entry, status);
}
int entry_point_by_version(const char *name, void **entry, unsigned version,
                           unsigned long long flags, int *status) {
  return find_entry(name, entry, status);
}
int cuInit(unsigned flags) { return use_driver(); }
int cuDriverGetVersion(int *version) { *version = CUDART_VERSION; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
  *flags = 0;
  *is_active = device < driver.num_visible && has_context[device];
  return 0;
}
int cuCtxGetCurrent(void **context) {
  *context = has_context[current_device] ? &has_context[current_device] : NULL;
  return 0;
}
int cuGetErrorString(int error, const char **text) { *text = cudaGetErrorString(error); return 0; }
int cuGetErrorName(int error, const char **name) { *name = cudaGetErrorName(error); return 0; }

/* Counts of this process, for Python: see soft_gpu.count. */
long soft_gpu_count(const char *name) {
#define COUNT(field) if (strcmp(name, #field) == 0) return counts.field;
  COUNT(operators) COUNT(waits) COUNT(to_device) COUNT(to_host) COUNT(within) COUNT(launches)
  COUNT(races)
  return -1;
}
