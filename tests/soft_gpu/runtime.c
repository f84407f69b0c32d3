/* CUDA's runtime, and what torch calls of the driver, with host memory as device memory: the work
   of a stream is done when the call returns. No kernel runs here: operators.cpp computes on the
   CPU, and a kernel that is launched all the same is an error with its name. */
#define _GNU_SOURCE
#include "staged.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* ---- errors ---- */
static __thread cudaError_t last_error;
static _Atomic int sticky_error; /* as an illegal access is: every later call has it too */
static char launched[400]; /* the last kernel that was */

static cudaError_t set_error(cudaError_t error) { return error ? last_error = error : error; }
cudaError_t cudaPeekAtLastError(void) { return last_error; }
cudaError_t cudaGetLastError(void) {
  const cudaError_t error = last_error;
  last_error = sticky_error;
  return error;
}

static const struct error { cudaError_t code; const char *name, *text; } errors[] = {
#define ERROR(code, text) {code, #code, text}
    ERROR(cudaSuccess, "no error"), ERROR(cudaErrorInvalidValue, "invalid argument"),
    ERROR(cudaErrorMemoryAllocation, "out of memory"),
    ERROR(cudaErrorInitializationError, "initialization error"),
    ERROR(cudaErrorDevicesUnavailable, "CUDA-capable device(s) is/are busy or unavailable"),
    ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    ERROR(cudaErrorNoKernelImageForDevice, launched),
    ERROR(cudaErrorSharedObjectInitFailed, "the operators of soft GPUs can't be loaded"),
    ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    ERROR(cudaErrorNotSupported, "operation not supported"), ERROR(cudaErrorUnknown, "unknown"),
};
static const struct error *find_error(cudaError_t code) {
  const struct error *error = errors;
  while (error->code != code && error->code != cudaErrorUnknown) error++;
  return error;
}
const char *cudaGetErrorName(cudaError_t code) { return find_error(code)->name; }
const char *cudaGetErrorString(cudaError_t code) { return find_error(code)->text; }

/* ---- the driver: started by the first call that needs it, for this process alone ---- */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
  _Atomic pid_t owner; /* the process that has started it; in a fork of that it can't be used */
  int num_visible, visible[MAX_CARDS]; /* the cards that CUDA_VISIBLE_DEVICES shows */
  size_t memory;
  long fail_at;
  bool poison, late;
} driver;
static _Atomic bool has_context[MAX_CARDS];
static __thread int current; /* device */
static struct { _Atomic long operators, waits, to_device, to_host, launches, races; } counts;

static void trace(const char *event, const char *detail) { /* a line of SOFT_GPU_TRACE */
  const char *path = getenv("SOFT_GPU_TRACE");
  const int file = path ? open(path, O_WRONLY | O_APPEND | O_CREAT, 0666) : -1;
  if (file < 0) return;
  dprintf(file, "%d %s%s\n", getpid(), event, detail);
  close(file);
}
static void find_visible(void) {
  const char *listed = getenv("CUDA_VISIBLE_DEVICES");
  for (int card = 0; !listed && card < num_cards(); card++)
    driver.visible[driver.num_visible++] = card;
  char *copy = strdup(listed ? listed : ""), *rest;
  for (char *word = strtok_r(copy, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
    unsigned number;
    const int card = sscanf(word, "GPU-%x", &number) == 1 ? (int)number - 1 : atoi(word);
    if (card < 0 || card >= num_cards() || driver.num_visible == MAX_CARDS) break; /* as CUDA */
    driver.visible[driver.num_visible++] = card;
  }
  free(copy);
}

/* Some kernels of torch are Triton's, unless it is told this before it is imported. */
__attribute__((constructor)) static void begin(void) { setenv("TORCH_DISABLE_NATIVE_JIT", "1", 0); }

void *soft_gpu_reduce; /* for nccl.c; NULL where there are no operators */
static void load_operators(void) { /* from the folder of this library: they install themselves */
  void *library = dlopen("soft_gpu_operators.so", RTLD_NOW);
  if (library) soft_gpu_reduce = dlsym(library, "soft_gpu_reduce");
  else fprintf(stderr, "soft GPU: %s\n", dlerror());
}
/* Memory of the cards is shared by all processes that have the same SOFT_GPU_LEDGER. */
enum { MAX_PROCESSES = 256 };
static struct row { _Atomic size_t used[MAX_CARDS]; } *ledger; /* of each process */
static int ledger_file, own_row; /* whose byte of the file is locked as long as the process lives */

static bool can_lock(int row, int command) { /* F_SETLK: and it is locked; F_GETLK: asks only */
  struct flock byte = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = row, .l_len = 1};
  return fcntl(ledger_file, command, &byte) == 0 && (command == F_SETLK || byte.l_type == F_UNLCK);
}
static void open_ledger(void) {
  const char *path = getenv("SOFT_GPU_LEDGER");
  const size_t bytes = MAX_PROCESSES * sizeof *ledger;
  ledger_file = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666) : memfd_create("ledger", 0);
  if (ledger_file < 0 || ftruncate(ledger_file, bytes)) abort();
  ledger = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ledger_file, 0);
  while (!can_lock(own_row, F_SETLK))
    if (++own_row == MAX_PROCESSES) abort();
  memset(&ledger[own_row], 0, sizeof *ledger);
}
static void start_driver(void) {
  pthread_mutex_lock(&lock);
  if (!driver.owner) {
    find_visible();
    driver.memory = (size_t)staged("SOFT_GPU_MEMORY", 16e9);
    driver.fail_at = (long)staged("SOFT_GPU_FAIL_AT", -1);
    driver.poison = staged("SOFT_GPU_POISON", 0);
    driver.late = staged("SOFT_GPU_LATE", 0);
    if (driver.poison) setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", 0); /* so that more is new */
    open_ledger();
    load_operators();
    trace("driver", "");
    driver.owner = getpid();
  }
  pthread_mutex_unlock(&lock);
}
static cudaError_t use_driver(void) {
  if (!driver.owner) start_driver();
  if (driver.owner != getpid()) {
    trace("forked", "");
    return set_error(cudaErrorInitializationError);
  }
  if (!soft_gpu_reduce) return set_error(cudaErrorSharedObjectInitFailed);
  return set_error(driver.num_visible ? (cudaError_t)sticky_error : cudaErrorNoDevice);
}

/* ---- memory ---- */
static size_t memory_left(int card) {
  size_t used = is_listed("SOFT_GPU_FULL", card) ? driver.memory : 0;
  for (int row = 0; row < MAX_PROCESSES; row++)
    if (ledger[row].used[card] && (row == own_row || !can_lock(row, F_GETLK)))
      used += ledger[row].used[card];
  return used < driver.memory ? driver.memory - used : 0;
}
static cudaError_t take_memory(int device, size_t bytes) {
  const int card = driver.visible[device];
  pthread_mutex_lock(&lock);
  const bool fits = bytes <= memory_left(card);
  if (fits) ledger[own_row].used[card] += bytes;
  pthread_mutex_unlock(&lock);
  return set_error(fits ? cudaSuccess : cudaErrorMemoryAllocation);
}

static cudaError_t use_context(int device) {
  const cudaError_t error = use_driver();
  if (error) return error;
  if (device < 0 || device >= driver.num_visible) return set_error(cudaErrorInvalidDevice);
  if (has_context[device]) return cudaSuccess;
  const int card = driver.visible[device];
  char number[8];
  snprintf(number, sizeof number, "%d", card);
  if (is_listed("SOFT_GPU_DEAD", card)) return set_error(cudaErrorDevicesUnavailable);
  if (take_memory(device, (size_t)staged("SOFT_GPU_CONTEXT", 0))) return last_error;
  if (!atomic_exchange(&has_context[device], true)) trace("context ", number);
  return cudaSuccess;
}

static struct block { char *start; size_t bytes; int type, device; struct block *next; } *blocks;
static struct block **find_block(const char *at) { /* under the lock */
  struct block **found = &blocks;
  while (*found && !(at >= (*found)->start && at < (*found)->start + (*found)->bytes))
    found = &(*found)->next;
  return found;
}
static cudaError_t allocate(void **start, size_t bytes, int type) {
  const bool on_device = type == cudaMemoryTypeDevice;
  const cudaError_t error = use_context(current);
  if (error) return error;
  bytes += !bytes;
  if (on_device && take_memory(current, bytes)) return last_error;
  *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*start == MAP_FAILED) abort(); /* this machine has no memory left, whatever the card has */
  if (on_device && driver.poison) memset(*start, 0xff, bytes); /* NaN */
  struct block *block = malloc(sizeof *block);
  pthread_mutex_lock(&lock);
  *block = (struct block){*start, bytes, type, current, blocks};
  blocks = block;
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}
cudaError_t cudaFree(void *start) {
  const cudaError_t error = use_driver();
  if (error || !start) return error;
  pthread_mutex_lock(&lock);
  struct block **found = find_block(start), *block = *found;
  if (block) {
    *found = block->next;
    if (block->type == cudaMemoryTypeDevice)
      ledger[own_row].used[driver.visible[block->device]] -= block->bytes;
    munmap(block->start, block->bytes);
    free(block);
  }
  pthread_mutex_unlock(&lock);
  return set_error(block ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaMalloc(void **start, size_t n) { return allocate(start, n, cudaMemoryTypeDevice); }
cudaError_t cudaHostAlloc(void **start, size_t bytes, unsigned flags) {
  return allocate(start, bytes, cudaMemoryTypeHost);
}
cudaError_t cudaFreeHost(void *start) { cudaDeviceSynchronize(); return cudaFree(start); }
cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
  const cudaError_t error = use_context(current);
  *left = error ? 0 : memory_left(driver.visible[current]);
  *total = driver.memory;
  return error;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *at) {
  *found = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = -2};
  pthread_mutex_lock(&lock);
  const struct block *block = *find_block(at);
  if (block)
    *found = (struct cudaPointerAttributes){block->type, block->device, (void *)at, (void *)at};
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

/* ---- streams, events and copies. With SOFT_GPU_LATE a copy between pinned and device memory is
   under way until the host waits for its stream, or for an event behind it: what goes to the host
   is NaN until then, and what comes from the host must then still be what it was. ---- */
enum { MAX_STREAMS = 32 }; /* those that such a copy has gone through; they are numbered from 1 */
struct progress { long copies[MAX_STREAMS]; }; /* by stream: the last copy that comes before */
struct stream { int number; struct progress progress; };
struct event { struct timespec recorded; struct progress progress; };
struct copy {
  char *host, *data; /* data: what arrives at the host, or was to leave it */
  size_t bytes;
  bool to_host;
  int stream;
  long number;
  struct copy *next;
};
static struct copy *copies;
static struct stream default_streams[MAX_CARDS];

static struct stream *stream_of(cudaStream_t handle) {
  return handle ? (struct stream *)handle : &default_streams[current];
}
static struct event *event_of(cudaEvent_t handle) { return (struct event *)handle; }
/* Let copies arrive: those up to this progress (NULL: all), or all that touch this memory. */
static void arrive(const struct progress *progress, const char *host, size_t bytes) {
  if (!driver.late) return;
  pthread_mutex_lock(&lock);
  for (struct copy **at = &copies, *copy; (copy = *at);) {
    if (host ? copy->host >= host + bytes || host >= copy->host + copy->bytes
             : progress && copy->number > progress->copies[copy->stream]) {
      at = &copy->next;
      continue;
    }
    if (copy->to_host) memcpy(copy->host, copy->data, copy->bytes);
    else if (memcmp(copy->host, copy->data, copy->bytes)) {
      counts.races++;
      fprintf(stderr, "soft GPU: %zu pinned bytes at %p were overwritten while they were copied\n",
              copy->bytes, (void *)copy->host);
    }
    *at = copy->next;
    free(copy->data);
    free(copy);
  }
  pthread_mutex_unlock(&lock);
}
static void begin_late_copy(char *host, size_t bytes, struct stream *stream, bool to_host) {
  static long last_copy;
  static int last_stream;
  struct copy *copy = malloc(sizeof *copy);
  char *data = memcpy(malloc(bytes), host, bytes);
  if (!stream->number) stream->number = ++last_stream;
  if (stream->number == MAX_STREAMS) abort();
  *copy = (struct copy){host, data, bytes, to_host, stream->number, ++last_copy, copies};
  stream->progress.copies[stream->number] = copy->number;
  copies = copy;
  if (to_host) memset(host, 0xff, bytes);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  const cudaError_t error = use_context(current);
  if (error) return error;
  const bool to_host = kind == cudaMemcpyDeviceToHost, to_device = kind == cudaMemcpyHostToDevice;
  char *host = to_host ? to : (char *)from;
  counts.to_host += to_host, counts.to_device += to_device;
  if (to_host || to_device) arrive(NULL, host, bytes);
  memmove(to, from, bytes);
  if (!driver.late || !(to_host || to_device)) return cudaSuccess;
  pthread_mutex_lock(&lock);
  const struct block *block = *find_block(host);
  const bool is_pinned = block && block->type == cudaMemoryTypeHost;
  if (is_pinned) begin_late_copy(host, bytes, stream_of(stream), to_host);
  pthread_mutex_unlock(&lock);
  if (to_host && !is_pinned) arrive(&stream_of(stream)->progress, NULL, 0); /* the call waits */
  return cudaSuccess;
}
static cudaError_t wait(const struct progress *progress) {
  counts.waits++;
  arrive(progress, NULL, 0);
  return use_context(current);
}
static cudaError_t answer_done(const struct progress *progress) {
  arrive(progress, NULL, 0);
  return use_driver();
}
cudaError_t cudaDeviceSynchronize(void) { return wait(NULL); }
cudaError_t cudaStreamSynchronize(cudaStream_t each) { return wait(&stream_of(each)->progress); }
cudaError_t cudaEventSynchronize(cudaEvent_t each) { return wait(&event_of(each)->progress); }
cudaError_t cudaStreamQuery(cudaStream_t each) { return answer_done(&stream_of(each)->progress); }
cudaError_t cudaEventQuery(cudaEvent_t each) { return answer_done(&event_of(each)->progress); }
static cudaError_t create(void *handle, size_t bytes) {
  const cudaError_t error = use_context(current);
  *(void **)handle = error ? NULL : calloc(1, bytes);
  return error;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return create(stream, sizeof(struct stream)); }
cudaError_t cudaEventCreate(cudaEvent_t *event) { return create(event, sizeof(struct event)); }
SAME_AS(cudaStreamCreate, cudaStreamCreateWithFlags)
SAME_AS(cudaStreamCreate, cudaStreamCreateWithPriority)
SAME_AS(cudaEventCreate, cudaEventCreateWithFlags)
SAME_AS(cudaEventRecord, cudaEventRecordWithFlags)
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  *event_of(event) = (struct event){.progress = stream_of(stream)->progress};
  clock_gettime(CLOCK_MONOTONIC, &event_of(event)->recorded);
  return use_driver();
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  long *own = stream_of(stream)->progress.copies, *other = event_of(event)->progress.copies;
  for (int i = 0; i < MAX_STREAMS; i++) own[i] = own[i] < other[i] ? other[i] : own[i];
  return use_driver();
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end) {
  const struct timespec a = event_of(begin)->recorded, b = event_of(end)->recorded;
  *ms = (float)((b.tv_sec - a.tv_sec) * 1e3 + (b.tv_nsec - a.tv_nsec) * 1e-6);
  return use_driver();
}

/* ---- devices ---- */
cudaError_t cudaGetDeviceCount(int *count) {
  const cudaError_t error = use_driver();
  *count = error ? 0 : driver.num_visible;
  return error;
}
cudaError_t cudaGetDevice(int *device) { *device = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  const cudaError_t error = use_context(device);
  if (!error) current = device;
  return error;
}
int soft_gpu_card(void) { return driver.visible[current]; } /* by its number in NVML */
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
  const cudaError_t error = use_driver();
  if (error) return error;
  if (device < 0 || device >= driver.num_visible) return set_error(cudaErrorInvalidDevice);
  const int card = driver.visible[device];
  const int capability = (int)(10 * staged("SOFT_GPU_CAPABILITY", 8.0) + 0.5);
  *found = (struct cudaDeviceProp){
      .name = "Soft GPU", .uuid.bytes[3] = (char)(card + 1), .pciBusID = card,
      .totalGlobalMem = driver.memory, .major = capability / 10, .minor = capability % 10,
      .multiProcessorCount = 108, .warpSize = 32, .l2CacheSize = 40 << 20,
      .maxThreadsPerBlock = 1024, .maxThreadsPerMultiProcessor = 2048};
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  struct cudaDeviceProp found = {0};
  const cudaError_t error = cudaGetDeviceProperties(&found, device);
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? found.major
           : attribute == cudaDevAttrComputeCapabilityMinor ? found.minor : 1; /* a divisor */
  return error;
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", driver.visible[device]);
  return use_driver();
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) { return *least = *most = 0; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { return *can = 0; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
SAME_AS(cudaRuntimeGetVersion, cudaDriverGetVersion)

/* ---- kernels ---- */
static struct { const void *function; const char *name; } *kernels;
static size_t num_kernels;
void __cudaRegisterFunction(void *module, const void *function, void *entry, const char *name) {
  if (num_kernels % 4096 == 0)
    kernels = realloc(kernels, (num_kernels + 4096) * sizeof *kernels);
  kernels[num_kernels].function = function;
  kernels[num_kernels++].name = name;
}
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                             size_t memory, cudaStream_t stream) {
  size_t i = 0;
  while (i < num_kernels && kernels[i].function != function) i++;
  snprintf(launched, sizeof launched, "soft GPU: there are no numbers for the CUDA kernel %s",
           i < num_kernels ? kernels[i].name : "of a library");
  counts.launches++;
  return set_error(cudaErrorNoKernelImageForDevice);
}
SAME_AS(cudaLaunchKernel, __cudaLaunchKernel)
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function,
                                void **arguments) {
  return cudaLaunchKernel(function, config->gridDim, config->blockDim, arguments, 0, NULL);
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
int max_blocks(int *blocks) __asm__("cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags");
int max_blocks(int *blocks) { *blocks = 1; return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
  *found = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .ptxVersion = 80};
  return cudaSuccess;
}

/* Called by operators.cpp before each operator. */
cudaError_t soft_gpu_operator(const char *name) {
  const cudaError_t error = use_context(current);
  if (error || ++counts.operators != driver.fail_at) return error;
  trace("fault in ", name);
  return set_error(sticky_error = cudaErrorIllegalAddress);
}

void soft_gpu_fail(void) { driver.fail_at = counts.operators + 1; } /* the next operator does */

/* ---- the driver's own interface, as torch uses it beside the runtime ---- */
static int refuse(void) { return cudaErrorNotSupported; }
int find_entry(const char *name, void **entry, unsigned version, long flags, int *status)
    __asm__("cudaGetDriverEntryPointByVersion");
int find_entry(const char *name, void **entry, unsigned version, long flags, int *status) {
  *entry = dlsym(RTLD_DEFAULT, name);
  if (!*entry) *entry = (void *)refuse;
  return *status = cudaSuccess;
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
  *flags = 0;
  *is_active = device < driver.num_visible && has_context[device];
  return cudaSuccess;
}
/* Called from Python: tests.soft_gpu.count. */
long soft_gpu_count(const char *name) {
#define COUNT(field) if (strcmp(name, #field) == 0) return counts.field
  COUNT(operators); COUNT(waits); COUNT(to_device); COUNT(to_host); COUNT(launches); COUNT(races);
  return -1;
}
